"""Log lines that never keep anyone waiting: whoever reads them may have stopped."""

from __future__ import annotations

import logging
import os
import select
import sys
from collections.abc import Iterator, Sequence

_SURE = 4096


def start(form: str) -> None:
    """Send what every logger of this process says, from INFO on, to stderr."""
    logging.basicConfig(level=logging.INFO, handlers=[UnblockingHandler(2, form)])


class UnblockingHandler(logging.Handler):
    """Writes lines that fit the pipe now, counts the others as dropped and says so when it can write again.

    A pipe that polls writable takes `_SURE` bytes without blocking.
    """

    def __init__(self, fd: int, form: str = "%(asctime)s [%(process)d] %(message)s") -> None:
        super().__init__()
        self._fd = fd
        self._dropped = 0
        self._new_poll = _original_poll()
        self.setFormatter(logging.Formatter(form))

    def emit(self, record: logging.LogRecord) -> None:
        self.write([self.format(record).encode("utf-8", "backslashreplace") + b"\n"])

    def write(self, lines: Sequence[bytes]) -> None:
        """Write lines, each with its end, as many at a time as the pipe is sure to take."""
        notice = [b"%d log lines dropped\n" % self._dropped] if self._dropped else []
        left = len(notice) + len(lines)
        poll = self._new_poll()  # one for all would not bear two threads
        poll.register(self._fd, select.POLLOUT)
        try:
            for count, piece in _pieces([*notice, *lines]):
                if not poll.poll(0):
                    break
                os.write(self._fd, piece)
                left -= count
        except OSError:
            pass  # a full disk or a closed pipe is no reason to fail a request
        # The notice, which goes first, stands for all that were dropped before.
        self._dropped = self._dropped + len(lines) if left > len(lines) else left


def _pieces(lines: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """`lines` in pieces of whole ones where they fit, and how many end with each."""
    waiting: list[bytes] = []
    size = 0
    for line in lines:
        if waiting and size + len(line) > _SURE:
            yield len(waiting), b"".join(waiting)
            waiting, size = [], 0
        while len(line) > _SURE:
            yield 0, line[:_SURE]
            line = line[_SURE:]
        waiting.append(line)
        size += len(line)
    if waiting:
        yield len(waiting), b"".join(waiting)


def _original_poll() -> type[select.poll]:
    """`select.poll` from before gevent's patching: asking whether a write would block must not switch greenlets."""
    monkey = sys.modules.get("gevent.monkey")
    original: type[select.poll] = monkey.get_original("select", "poll") if monkey is not None else select.poll
    return original

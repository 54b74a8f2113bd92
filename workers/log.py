"""Log lines that never keep anyone waiting: whoever reads them may have stopped."""

from __future__ import annotations

import logging
import os
import select
import sys


def start(form: str) -> None:
    """Send what every logger of this process says, from INFO on, to stderr."""
    logging.basicConfig(level=logging.INFO, handlers=[UnblockingHandler(2, form)])


class UnblockingHandler(logging.Handler):
    """Writes lines that fit the pipe now, counts the others as dropped and says so when it can write again.

    A pipe that polls writable takes 4,096 bytes without blocking.
    """

    def __init__(self, fd: int, form: str = "%(asctime)s [%(process)d] %(message)s") -> None:
        super().__init__()
        self._fd = fd
        self._dropped = 0
        self._poll = _original_poll()()
        self._poll.register(fd, select.POLLOUT)
        self.setFormatter(logging.Formatter(form))

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        if self._dropped:
            line = b"%d log lines dropped\n" % self._dropped + line
        try:
            if not self._poll.poll(0):
                self._dropped += 1
                return
            for at in range(0, len(line), 4096):
                if at and not self._poll.poll(0):
                    break
                os.write(self._fd, line[at : at + 4096])
            self._dropped = 0
        except OSError:
            self._dropped += 1  # a full disk or a closed pipe is no reason to fail a request


def _original_poll() -> type[select.poll]:
    """`select.poll` from before gevent's patching: asking whether a write would block must not switch greenlets."""
    monkey = sys.modules.get("gevent.monkey")
    original: type[select.poll] = monkey.get_original("select", "poll") if monkey is not None else select.poll
    return original

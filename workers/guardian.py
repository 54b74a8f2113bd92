"""The pool's last will: a small process that ends what workers have started when the pool itself is killed.

Workers die with the pool, but a process that a model has started would not: it only shares its worker's process
group. The guardian knows the groups, and sees the pool's end as the end of a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
from struct import Struct

import setproctitle

_GROUP = Struct("i")


class Guardian:
    """Lost itself, it is started again. `groups`: the process groups of the workers that live."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._start()

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._tell(group)

    def remove(self, group: int) -> None:
        """The group's worker is about to be reaped, and the rest of it has been killed: the id may become another's."""
        self._groups.discard(group)
        self._tell(-group)

    def watch_over(self) -> None:
        """Start it anew if it has been killed. At every tick of the pool."""
        if os.waitpid(self._pid, os.WNOHANG)[0]:
            os.close(self._write)
            self._start()

    def close(self) -> None:
        os.close(self._write)
        os.waitpid(self._pid, 0)

    def _tell(self, word: int) -> None:
        # If it is gone, the next tick starts one that is told everything.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write, _GROUP.pack(word))

    def _start(self) -> None:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _guard(read)
            finally:
                os._exit(0)
        os.close(read)
        for group in self._groups:
            self._tell(group)


def _guard(read: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setproctitle.setproctitle("headrace guardian")
    # The pool's sockets, pipes and memory are not this process's to keep open.
    os.dup2(read, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    groups: set[int] = set()
    while data := os.read(0, 4096):
        for (word,) in _GROUP.iter_unpack(data):
            if word > 0:
                groups.add(word)
            else:
                groups.discard(-word)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

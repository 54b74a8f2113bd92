"""The streams that are open in this process: how many there may be, and how they learn that the server ends.

Each one keeps a connection for as long as it lasts, so they are fewer than the connections a process takes: whatever
else is asked, its health for one, finds a free one. The gunicorn master loads this module, so it imports nothing of
the application.
"""

from __future__ import annotations

import sys
from typing import Protocol
from weakref import WeakSet


class Open(Protocol):
    def server_ends(self) -> None:
        """End now, in good order."""


class OpenStreams:
    """`limit`: so many at once. `ending`: there are to be no more."""

    def __init__(self) -> None:
        self.limit = sys.maxsize
        self.ending = False
        self._open: WeakSet[Open] = WeakSet()  # one that nobody holds any more has ended

    def __len__(self) -> int:
        return len(self._open)

    def allow(self, connections: int) -> None:
        """Set the limit for a process that takes so many connections at once: four in five."""
        self.limit = max(1, connections * 4 // 5)

    def add(self, stream: Open) -> bool:
        """Whether there was room."""
        if len(self._open) >= self.limit:
            return False
        self._open.add(stream)
        return True

    def discard(self, stream: Open) -> None:
        self._open.discard(stream)

    def end(self) -> None:
        """Tell all of them, and have no more."""
        self.ending = True
        for stream in list(self._open):
            stream.server_ends()


streams = OpenStreams()
"""Those of this process."""

"""A stream as its reader has it: the same for both drivers, who differ in how one waits.

The pieces lie in the task, where `ClientCore.receive` puts them. The slot is given back once the end has been
seen, or, if the stream is closed before, by its final frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from workers.core import ClientCore, Task
from workers.errors import Cancelled, PoolError
from workers.records import PIECE_COST


class Pieces:
    """`wait`: until the task has pieces or is over, or so many seconds have passed. `wake`: tell whoever waits for it.
    `callers`: where the task stands while its caller's connection is watched."""

    __slots__ = ("_callers", "_core", "_failure", "_over", "_task", "_wait", "_wake")

    def __init__(
        self,
        core: ClientCore,
        task: Task,
        wait: Callable[[Task, float | None], object],
        wake: Callable[[list[Task]], object],
        callers: MutableMapping[Task, Any],
    ) -> None:
        self._core = core
        self._task = task
        self._wait = wait
        self._wake = wake
        self._callers = callers
        self._over = False
        self._failure: PoolError | None = None

    @property
    def ended(self) -> bool:
        """The end has come, and every piece before it has been taken."""
        task = self._task
        # In this order: the last pieces come before the end does.
        if not self._over and (task.outcome or task.error) and not task.pieces:
            self._end()
        return self._over

    def wait(self, seconds: float | None) -> bool:
        """Until there is something to take or the end is known; false after so many seconds without."""
        task = self._task
        if not (task.pieces or task.outcome or task.error):
            self._wait(task, seconds)
        return bool(task.pieces or task.outcome or task.error)

    def take(self) -> list[bytes]:
        """The whole pieces that have come since the last time, maybe none; never waits."""
        return self._core.take(self._task)

    def grant(self) -> None:
        """All that was taken so far has been consumed: as much more may be produced."""
        self._core.grant(self._task)

    def failure(self) -> PoolError | None:
        """Once ended: why it was cut short; None for a complete one."""
        return self._failure

    def notify(self, heard: Callable[[], None] | None) -> None:
        """Have `heard` called, by whoever hears of it, each time something new has come, the end included, and at once
        if something is there already. It must not wait for anything. None: no more of that."""
        task = self._task
        task.heard = heard
        if heard is not None and (task.pieces or task.outcome or task.error):
            heard()

    def close(self) -> None:
        """Cancel it unless it has ended; nothing is to be taken any more. Any number of times, by anybody."""
        task = self._task
        task.heard = None
        if self._core.abandon(task, Cancelled("the stream was closed")):
            self._wake([task])
        if task.pieces:
            task.pieces.clear()
        if not self._over and (task.outcome or task.error):
            self._end()

    def _end(self) -> None:
        core, task = self._core, self._task
        if task.outcome or task.error:
            self._callers.pop(task, None)
            failure = core.failure(task)
            # In this order: once it is released, the failure cannot be had any more.
            if not self._over:
                self._failure = failure
                self._over = True
            core.release(task)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next piece, granted as it is handed over; at the end raises the failure, if there is one."""
        task = self._task
        come = task.pieces
        assert come is not None
        while True:
            try:
                piece = come.popleft()
            except IndexError:
                if self.ended:
                    raise self._failure or StopIteration from None
                self.wait(None)
                continue
            task.consumed += len(piece) + PIECE_COST
            self._core.grant(task)
            return piece

    def __del__(self) -> None:
        if not self._over:
            self.close()

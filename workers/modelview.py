"""A model as one client sees it: whether it takes a task now, and how much room its answers need."""

from __future__ import annotations

from workers.errors import Draining, NotReady, Overloaded, from_code
from workers.slots import Private
from workers.status import ModelStatus, State
from workers.tensors import InputChecks

FRESH_NS = 1_000_000
KEPT = 64
"""Places for what other clients may queue within `FRESH_NS`."""


class ModelView:
    """The pool's last word of a model, and what follows from its specs. `private`: slots kept apart for it, by size."""

    __slots__ = (
        "_fresh_until_ns",
        "_room",
        "abandoned",
        "checks",
        "closed",
        "private",
        "row_room",
        "status",
        "stream_checks",
    )

    def __init__(self, status: ModelStatus, private: Private) -> None:
        self.private = private
        self.abandoned: set[int] = set()  # sequence numbers of tasks that nobody waits for, and no final frame yet
        self.update(status)

    def update(self, status: ModelStatus) -> None:
        self.status = status
        self.closed = _closed(status)
        self.look_again()
        name = status.name
        self.checks = InputChecks(
            status.inputs, status.max_batch, "" if status.predicts else f"model {name!r} does not predict, it streams"
        )
        self.stream_checks = InputChecks(status.inputs, 1, "" if status.streams else f"model {name!r} does not stream")
        # Bytes of one row of outputs; where a length is open, as much as the inputs take is tried first.
        self.row_room: int | None = 0
        for spec in status.outputs:
            if -1 in spec.shape:
                self.row_room = None
                break
            self.row_room += spec.zeros(1).nbytes + 64

    @property
    def has_room(self) -> bool:
        """Whether the queue is so far from its limit that others need not see at once what is queued."""
        return self._room > 0

    def admits(self, now_ns: int) -> bool:
        """Whether the last look at the queue is still good for one task more. It is for a moment, and far from the
        limit: what other clients put there meanwhile does not fill the places that are left out of account."""
        if self._room <= 0 or now_ns >= self._fresh_until_ns:
            return False
        self._room -= 1
        return True

    def admit(self, depth: int, now_ns: int) -> None:
        """Raise what keeps a task from being taken now, with `depth` records in the model's queue."""
        if self.closed is not None:
            raise from_code(*self.closed)
        # What was given up takes up no worker's time: with a queue full of that, the next is soon at work.
        places = self.status.max_queue - depth + len(self.abandoned)
        if places <= 0:
            raise Overloaded(f"the queue of model {self.status.name!r} is full")
        self._room = min(places // 2, places - KEPT)
        self._fresh_until_ns = now_ns + FRESH_NS

    def look_again(self) -> None:
        """The next task is admitted by a new look at the queue only."""
        self._room = 0
        self._fresh_until_ns = 0


def _closed(status: ModelStatus) -> tuple[str, str] | None:
    """Code and text of why the model takes no tasks in its present state; None if it does."""
    if status.state in (State.READY, State.RESTARTING):
        return None
    if status.state is State.REFUSED:
        return status.code, status.reason
    if status.state is State.DRAINING:
        return Draining.code, "the pool is draining"
    why = f": {status.reason}" if status.reason else ""
    return NotReady.code, f"model {status.name!r} is {status.state.value}{why}"

"""Which slots of an arena are free. There is no lock: each is taken and given back by one pop or append of a deque.

A quarter of the slots of each size is kept apart, a few for each model, so that a model that hangs with everything
it could lease leaves some for the others.
"""

from __future__ import annotations

from collections import deque

from workers.arena import Arena

Private = list[deque[int]]
"""The slots kept apart for one model, by size."""


class Slots:
    """Of `arena`, for so many models, whose own ones are `privates`."""

    __slots__ = ("_homes", "_shared", "privates")

    def __init__(self, arena: Arena, models: int) -> None:
        self._shared: list[deque[int]] = []
        self._homes: list[deque[int]] = []  # where each slot goes back to
        self.privates: list[Private] = [[] for _ in range(models)]
        for first, (_, count, _) in zip(arena.firsts, arena.classes, strict=True):
            kept = 0 if models < 2 else count // 4 // models
            slots = range(first, first + count)
            for i, private in enumerate(self.privates):
                private.append(deque(slots[i * kept : (i + 1) * kept]))
                self._homes += [private[-1]] * kept
            self._shared.append(deque(slots[models * kept :]))
            self._homes += [self._shared[-1]] * len(self._shared[-1])

    def take(self, private: Private, size: int) -> int:
        """A free slot of that size, by its number, for the model with these slots of its own; -1 if there is none."""
        try:
            return self._shared[size].pop()
        except IndexError:
            pass
        try:
            return private[size].pop()
        except IndexError:
            return -1

    def give_back(self, slot: int) -> None:
        self._homes[slot].append(slot)

    @property
    def out(self) -> int:
        """How many are not free."""
        free = sum(map(len, self._shared)) + sum(len(own) for private in self.privates for own in private)
        return len(self._homes) - free

"""Where answers wait for the end of the hub's turn, to leave one right behind the other.

Sending wakes whoever reads. Sent one by one while the turn goes on, each answer wakes the client, or the proxy, anew;
back to back they wake it once, and its next requests come together as well, which makes fuller turns and fuller
batches. The gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Posted(Protocol):
    def send_posted(self) -> None:
        """Send as much as the socket takes. Never blocks, never raises."""


class Outbox:
    """`at_end_of_turn` has a function called in the hub, when it has heard everybody and before it waits again."""

    def __init__(self, at_end_of_turn: Callable[[Callable[[], None]], object]) -> None:
        self._at_end_of_turn = at_end_of_turn
        self._waiting: list[Posted] = []

    def post(self, answer: Posted) -> None:
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            self._at_end_of_turn(self.flush)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.send_posted()

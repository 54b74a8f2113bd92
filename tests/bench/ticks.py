"""What is streamed in the benchmark: `EVENTS` pieces, `PACE_S` apart."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from workers.model import Array, Last, TensorSpec

EVENTS = 50
PACE_S = 0.02


class Ticks:
    """By steps: one at each tick of a clock, for all streams that are live. A stream that joins has its first piece at
    the next tick."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None:
        self._next = 0.0

    def start(self, request: Mapping[str, Array]) -> list[int]:
        return [0]

    def step(self, states: Sequence[list[int]]) -> Sequence[str | Last]:
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + PACE_S
        pieces: list[str | Last] = []
        for state in states:
            state[0] += 1
            piece = f"piece {state[0]} "
            pieces.append(piece if state[0] < EVENTS else Last(piece))
        return pieces


class Idle:
    """One piece, and then nothing for as long as somebody listens: an iterator would take a thread for each."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None: ...

    def start(self, request: Mapping[str, Array]) -> list[str]:
        return ["piece"]

    def step(self, states: Sequence[list[str]]) -> Sequence[str]:
        pieces = [state.pop() if state else "" for state in states]
        if not any(pieces):
            time.sleep(PACE_S)
        return pieces


class Endless:
    """A piece at every tick, for as long as somebody listens."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None: ...

    def start(self, request: Mapping[str, Array]) -> None: ...

    def step(self, states: Sequence[None]) -> Sequence[str]:
        time.sleep(PACE_S)
        return ["piece "] * len(states)

"""Models these tests need besides the zoo."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from workers.model import Array, Last, TensorSpec


class Gate:
    """A row of 1 is not answered before the file `gate` is there. Answers how many rows it has been asked for, the
    warm-up not counted."""

    inputs: Sequence[TensorSpec] = (TensorSpec("wait", "int64"),)
    outputs: Sequence[TensorSpec] = (TensorSpec("calls", "int64"),)

    def __init__(self, gate: str) -> None:
        self.gate = Path(gate)
        self.calls = -1

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        self.calls += len(batch["wait"])
        while batch["wait"].any() and not self.gate.exists():
            time.sleep(0.002)
        return {"calls": np.full(len(batch["wait"]), self.calls)}


class SlowScore:
    """For the model `score`: takes `seconds` for every batch. features float32 (4,) → scores float32 (2,), their sum
    and their number."""

    inputs: Sequence[TensorSpec] = (TensorSpec("features", "float32", (4,)),)
    outputs: Sequence[TensorSpec] = (TensorSpec("scores", "float32", (2,)),)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        time.sleep(self.seconds)
        features = batch["features"]
        return {"scores": np.stack([features.sum(1), np.full(len(features), 4, np.float32)], 1)}


class Ticks:
    """Streams by steps, one step for all of them every `ms`: so many silent ones, then `count` pieces, without
    end if that is 0: `<nonce>.<number> `, with `pad` letters x before the space. The piece `fails`, from 1, raises.

    Predicts how many streams are live and how many pieces have been made since the start."""

    inputs: Sequence[TensorSpec] = tuple(
        TensorSpec(name, "int64") for name in ("nonce", "count", "silent", "pad", "fails")
    )
    outputs: Sequence[TensorSpec] = (TensorSpec("live", "int64"), TensorSpec("made", "int64"))

    def __init__(self, ms: float = 5.0) -> None:
        self.seconds = ms / 1000
        self.live = self.made = 0

    def load(self) -> None: ...

    def start(self, request: Mapping[str, Array]) -> dict[str, int]:
        self.live += 1
        return {"at": -int(request["silent"]), **{name: int(array) for name, array in request.items()}}

    def step(self, states: Sequence[dict[str, int]]) -> Sequence[str | Last | Exception]:
        time.sleep(self.seconds)
        return [self._one(state) for state in states]

    def _one(self, state: dict[str, int]) -> str | Last | Exception:
        state["at"] += 1
        at = state["at"]
        if at <= 0:
            return ""
        if at == state["fails"]:
            return ValueError("told to fail")
        self.made += 1
        piece = f"{state['nonce']}.{at}{'x' * state['pad']} "
        return Last(piece) if at == state["count"] else piece

    def stop(self, state: dict[str, int]) -> None:
        self.live -= 1

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = len(batch["nonce"])
        return {"live": np.full(rows, self.live), "made": np.full(rows, self.made)}

"""Models these tests need besides the zoo."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from workers.model import Array, TensorSpec


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

"""Models for tests of the pool's own robustness."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

THREADS = int(os.environ.get("OMP_NUM_THREADS", "0"))
"""As it was before this module imported anything that computes."""

import numpy as np  # noqa: E402

from tests.models.zoo import Echo  # noqa: E402
from workers.errors import Refused  # noqa: E402
from workers.model import Array, TensorSpec  # noqa: E402


class Diary(Echo):
    """Takes `seconds` for every call, and writes a line about it to the file `path`."""

    def __init__(self, path: str, seconds: float = 0.0) -> None:
        self.path = path
        self.seconds = seconds

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        with open(self.path, "a") as file:
            file.write(f"{batch['x'].shape}\n")
        time.sleep(self.seconds)
        return super().predict(batch)


class Fickle(Echo):
    """Refuses to load while the file `path` exists, as one would whose licence server is busy."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def load(self) -> None:
        if self.path.exists():
            raise Refused("no licence is free", code="LICENSE_FAILED")


class ManyWeights(Echo):
    """Shares `count` small arrays; x → their sum."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self) -> Iterable[tuple[str, Array]]:
        return ((f"a weight with a rather long name, number {i}", np.float32([1.0])) for i in range(self.count))

    def attach(self, arrays: Mapping[str, Array]) -> None:
        self.sum = sum(array[0] for array in arrays.values())

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": np.full_like(batch["x"], self.sum)}


class Threads(Echo):
    """Answers how many threads its libraries have been told to take. x → threads int64 ()."""

    outputs: Sequence[TensorSpec] = (TensorSpec("threads", "int64"),)

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"threads": np.full(len(batch["x"]), THREADS)}

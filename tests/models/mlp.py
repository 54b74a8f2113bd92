"""A network large enough that batching pays: 784-2048-2048-10, as the public comparisons of servers use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from workers.model import Array, TensorSpec

SIZES = (784, 2048, 2048, 10)


class Mlp:
    inputs: Sequence[TensorSpec] = (TensorSpec("pixels", "float32", (784,)),)
    outputs: Sequence[TensorSpec] = (TensorSpec("logits", "float32", (10,)),)

    def weights(self) -> Iterable[tuple[str, Array]]:
        rng = np.random.default_rng(1)
        for i, (n, m) in enumerate(pairwise(SIZES)):
            yield f"w{i}", rng.standard_normal((n, m), np.float32) / np.float32(n**0.5)

    def attach(self, arrays: Mapping[str, Array]) -> None:
        self._weights = [arrays[f"w{i}"] for i in range(len(SIZES) - 1)]

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        x = batch["pixels"]
        for weight in self._weights[:-1]:
            x = np.maximum(x @ weight, 0)
        return {"logits": x @ self._weights[-1]}


class Copy:
    """Answers its input, whatever its length: the cost of the way alone."""

    inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32", (-1,)),)
    outputs: Sequence[TensorSpec] = (TensorSpec("y", "float32", (-1,)),)

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": batch["x"]}

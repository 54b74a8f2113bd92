"""What a model is: the one seam through which users' code enters.

A model is a class. Its constructor takes the options of its configuration table as keyword arguments and
stores them; `load` does the heavy work, once, in each compute process. `predict` is given named arrays with a
leading batch axis and returns named arrays with the same number of rows. Input arrays are read-only views of
shared memory, valid during the call.

    class Dense:
        inputs = (TensorSpec("features", "float32", (4,)),)
        outputs = (TensorSpec("scores", "float32", (2,)),)

        def load(self) -> None: ...
        def predict(self, batch): return {"scores": batch["features"] @ self.weight.T + self.bias}

Two more methods go together and are optional. `weights()` yields (name, array) pairs; it runs in one process
only, the arrays are put into shared memory once, and every replica gets the same read-only pages by
`attach(arrays)`, before its `load()`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor. `dtype` is one of `DTYPES`; `shape` is that of a single row, without the batch axis,
    -1 standing for any length."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if any(n < -1 for n in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a length below -1")

    def zeros(self, rows: int) -> Array:
        """An array of this spec with every open length 1: what a warm-up is made of."""
        return np.zeros((rows, *(1 if n == -1 else n for n in self.shape)), self.dtype)


class Model(Protocol):
    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    def load(self) -> None:
        """Make ready to predict. Raise `Refused` to be listed as refusing; any other error is a failed start."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays of shape (rows, *spec.shape) in, arrays with the same number of rows out.

        An exception fails the task with `MODEL_FAILED` and its text; `InvalidInput` and `Refused` keep theirs.
        """


@runtime_checkable
class SharesWeights(Protocol):
    """A model whose read-only arrays are held once for all replicas."""

    def weights(self) -> Iterable[tuple[str, Array]]: ...

    def attach(self, arrays: Mapping[str, Array]) -> None: ...


def resolve(path: str) -> type[Model]:
    """The class named by `package.module:Class`."""
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ValueError(f"model {path!r} is not of the form package.module:Class")
    module = importlib.import_module(module_name)
    try:
        cls: type[Model] = getattr(module, class_name)
    except AttributeError:
        raise ValueError(f"module {module_name!r} has no {class_name!r}") from None
    return cls

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

A model may stream instead of that, or besides: it is given the named arrays of one row, without the batch axis,
read-only and valid until the stream has ended, and answers by pieces, each `bytes`, or `str` to be sent as UTF-8; an
empty one is not sent. Either by an iterator, which runs in a thread of its own:

    def stream(self, request): yield from ("one ", "by ", "one")

or by steps, each of which advances all live streams together, so that they share its work whenever they began:

    def start(self, request): return State(...)
    def step(self, states): return [...]    # for each state a piece, `Last(piece)`, None at the end, or an exception
    def stop(self, state): ...              # optional: the stream has left, however it ended

Two more methods go together and are optional. `weights()` yields (name, array) pairs; it runs in one process
only, the arrays are put into shared memory once, and every replica gets the same read-only pages by
`attach(arrays)`, before its `load()`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from workers.errors import ModelFailed

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
    """What every model has. Besides, it predicts, or streams in one of the two ways, or both."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    def load(self) -> None:
        """Make ready to work. Raise `Refused` to be listed as refusing; any other error is a failed start."""


@runtime_checkable
class Predicts(Protocol):
    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        """Arrays of shape (rows, *spec.shape) in, arrays with the same number of rows out.

        An exception fails the task with `MODEL_FAILED` and its text; `InvalidInput` and `Refused` keep theirs.
        """


Piece = str | bytes


@dataclass(frozen=True, slots=True)
class Last:
    """What a step answers for a stream that ends with this piece."""

    piece: Piece


def to_bytes(piece: object) -> bytes:
    """A piece as it is sent; `ModelFailed` if it is none."""
    if isinstance(piece, bytes):
        return piece
    if not isinstance(piece, str):
        raise ModelFailed(f"a piece is a {type(piece).__name__}, not str or bytes")
    try:
        return piece.encode()
    except UnicodeEncodeError as error:
        raise ModelFailed(f"a piece is no text: {error}") from None


def pieces_of(pieces: object) -> Iterator[object]:
    """What `stream` has returned, to be gone through; `ModelFailed` if it cannot be."""
    if isinstance(pieces, str | bytes) or not isinstance(pieces, Iterable):
        raise ModelFailed(
            f"`stream` returned {_kind(pieces)}; it must return an iterator of pieces, as a generator does with `yield`"
        )
    return iter(pieces)


def answers_of(answers: object, count: int) -> list[object]:
    """What `step` has returned for so many states; `ModelFailed` if it is no answer for each."""
    if isinstance(answers, str | bytes) or not isinstance(answers, Iterable):
        raise ModelFailed(f"`step` returned {_kind(answers)}; it must return a sequence, one answer for each state")
    found = list(answers)
    if len(found) != count:
        raise ModelFailed(f"a step answered {len(found)} pieces for {count} streams")
    return found


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


@runtime_checkable
class Iterates(Protocol):
    def stream(self, request: Mapping[str, Array]) -> Iterator[Piece]:
        """The pieces of one stream. Runs in a thread of its own beside those of other streams, and of `predict`. It
        waits between two pieces while its reader is behind, and is closed there when nobody wants it any more.

        An exception ends the stream with `MODEL_FAILED` and its text; `InvalidInput` and `Refused` keep theirs.
        """


@runtime_checkable
class Steps(Protocol):
    """May have `stop(state)` too. Nothing of it runs in two threads, or beside `predict`, at once."""

    def start(self, request: Mapping[str, Array]) -> Any:
        """The state of a new stream, whatever that is."""

    def step(self, states: Sequence[Any]) -> Sequence[Piece | Last | Exception | None]:
        """Advance the streams of `states`; in the same order for each a piece, which may be empty, `Last(piece)`, None
        if it has ended, or an exception that ends it alone. If it raises, all of them end with `MODEL_FAILED`.

        It is called again and again while there are streams: with nothing to say it should wait a moment itself."""


@runtime_checkable
class Stops(Protocol):
    def stop(self, state: Any) -> None:
        """The stream has left: ended, failed, cancelled, expired. Once for each `start`."""


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

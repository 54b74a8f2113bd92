"""Small models for tests: well-behaved ones that make something visible, and one for every way to go wrong.

All behave on zeros, which the warm-up sends; what goes wrong does so on a value, which tests send. A value stands
in the first element of a row. Options are keyword arguments, as for every model.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from workers.errors import InvalidInput, Refused
from workers.model import Array, TensorSpec


class Echo:
    """x float32 (any,) → y, the same."""

    inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32", (-1,)),)
    outputs: Sequence[TensorSpec] = (TensorSpec("y", "float32", (-1,)),)

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": batch["x"]}


def first(batch: Mapping[str, Array]) -> set[float]:
    """The value of each row."""
    return set(batch["x"][:, :1].ravel().tolist())


# Well-behaved, to make something visible.


class Slow:
    """Takes `seconds` for every batch, and `ms` more for the slowest row in it. ms float32 () → ms."""

    inputs: Sequence[TensorSpec] = (TensorSpec("ms", "float32"),)
    outputs: Sequence[TensorSpec] = (TensorSpec("ms", "float32"),)

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        time.sleep(self.seconds + float(batch["ms"].max()) / 1000)
        return {"ms": batch["ms"]}


class Tag:
    """nonce uint64 () → the same nonce, so that a caller can tell its own answer. Takes `ms` for every batch."""

    inputs: Sequence[TensorSpec] = (TensorSpec("nonce", "uint64"),)
    outputs: Sequence[TensorSpec] = (TensorSpec("nonce", "uint64"),)

    def __init__(self, ms: float = 0.0) -> None:
        self.ms = ms

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        if self.ms:
            time.sleep(self.ms / 1000)
        return {"nonce": batch["nonce"].copy()}


class DelayedTag(Tag):
    """As `Tag`, each row with a delay of its own: nonce uint64 (), ms float32 () → nonce."""

    inputs = (TensorSpec("nonce", "uint64"), TensorSpec("ms", "float32"))

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        time.sleep(float(batch["ms"].max()) / 1000)
        return super().predict(batch)


class Pid(Echo):
    """x float32 (any,) → pid int64 () of the worker, and rows int64 (), how many ran together."""

    outputs = (TensorSpec("pid", "int64"), TensorSpec("rows", "int64"))

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = len(batch["x"])
        return {"pid": np.full(rows, os.getpid()), "rows": np.full(rows, rows)}


class Strided:
    """x float32 (2, 3) → arrays that are views with odd strides: t = transposed (3, 2), r = each row's second axis
    backwards (2, 3), c = x[0, 0] broadcast (4,), n = x, held backwards in memory (2, 3)."""

    inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32", (2, 3)),)
    outputs: Sequence[TensorSpec] = (
        TensorSpec("t", "float32", (3, 2)),
        TensorSpec("r", "float32", (2, 3)),
        TensorSpec("c", "float32", (4,)),
        TensorSpec("n", "float32", (2, 3)),
    )

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        x = batch["x"]
        return {
            "t": x.transpose(0, 2, 1),
            "r": x[:, :, ::-1],
            "c": np.broadcast_to(x[:, 0, :1], (len(x), 4)),
            "n": x[::-1].copy()[::-1],
        }


class Huge:
    """n int64 () → y uint8 (any,), n bytes that count 0 to 250 over and over. One batch, one n."""

    inputs: Sequence[TensorSpec] = (TensorSpec("n", "int64"),)
    outputs: Sequence[TensorSpec] = (TensorSpec("y", "uint8", (-1,)),)

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        (n,) = set(batch["n"].tolist())
        return {"y": np.broadcast_to(huge(n), (len(batch["n"]), n))}


def huge(n: int) -> Array:
    """What `Huge` answers: uint8 (n,)."""
    return np.resize(np.arange(251, dtype=np.uint8), n)


class BigWeights:
    """`mb` megabytes of float32 ones that replicas share. x float32 () → y = x + 1, read through every page of the
    weights; pid int64 (); writable bool (), whether the weights could be changed."""

    inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32"),)
    outputs: Sequence[TensorSpec] = (
        TensorSpec("y", "float32"),
        TensorSpec("pid", "int64"),
        TensorSpec("writable", "bool"),
    )

    def __init__(self, mb: int = 1) -> None:
        self.mb = mb

    def weights(self) -> Iterable[tuple[str, Array]]:
        yield "ones", np.ones(self.mb << 18, np.float32)

    def attach(self, arrays: Mapping[str, Array]) -> None:
        self.ones = arrays["ones"]

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = len(batch["x"])
        return {
            "y": batch["x"] + self.ones[::1024].mean(dtype=np.float32),
            "pid": np.full(rows, os.getpid()),
            "writable": np.full(rows, self.ones.flags.writeable),
        }


# Wrong in what they do.


class Poison(Echo):
    """666 ends the process by SIGSEGV."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        if 666 in first(batch):
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().predict(batch)


class Hang(Echo):
    """667 never returns; 669 neither, in C and with the interpreter's lock held."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        while 667 in first(batch):
            time.sleep(1)
        while 669 in first(batch):
            ctypes.PyDLL(None).sleep(1_000_000)
        return super().predict(batch)


class Exit0(Echo):
    """668 leaves with status 0, 670 raises SystemExit, 671 KeyboardInterrupt."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        values = first(batch)
        if 668 in values:
            os._exit(0)
        if 670 in values:
            raise SystemExit(0)
        if 671 in values:
            raise KeyboardInterrupt
        return super().predict(batch)


class Leak(Echo):
    """Keeps `mb` megabytes, and a descriptor, of every batch."""

    def __init__(self, mb: int = 1) -> None:
        self.mb = mb
        self.kept: list[tuple[bytearray, int]] = []

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        self.kept.append((bytearray(b"\1" * (self.mb << 20)), os.open(os.devnull, os.O_RDONLY)))
        return super().predict(batch)


class Children(Echo):
    """Starts a process of its own at load and leaves it behind. x → child int64 (), its pid."""

    outputs = (TensorSpec("child", "int64"),)

    def load(self) -> None:
        self.child = subprocess.Popen(["sleep", "1000"])

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"child": np.full(len(batch["x"]), self.child.pid)}


class Scribble(Echo):
    """Writes into its inputs, which raises, for they are read-only."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        if first(batch) != {0}:
            batch["x"][...] = 0
        return super().predict(batch)


# Wrong in what they answer.


class Nan(Echo):
    """Answers NaN, or Infinity for 1, whatever the length."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": np.where(batch["x"] == 1, np.float32(np.inf), np.float32(np.nan))}


class Short(Echo):
    """Answers a row too few, unless all is 0."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": batch["x"] if first(batch) == {0} else batch["x"][1:]}


class WrongDtype(Echo):
    """Answers float64 where float32 is declared, unless all is 0."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": batch["x"] if first(batch) == {0} else batch["x"].astype(np.float64)}


class Raise(Echo):
    """Raises when any row is below 0."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        if min(first(batch)) < 0:
            raise ValueError("below zero")
        return super().predict(batch)


class Particular(Echo):
    """Refuses a row of -1, and calls a row of -2 invalid: errors that keep their code."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        values = first(batch)
        if -1 in values:
            raise Refused("not this one", code="NOT_THIS_ONE")
        if -2 in values:
            raise InvalidInput("'x' must not be -2")
        return super().predict(batch)


class NeedsTwo(Exception):
    """An exception that cannot be made again from its text, nor pickled."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__(f"needs {one} and {two}")
        self.callback = lambda: None


class Unpicklable(Echo):
    """Raises what cannot be pickled below 0, answers what cannot be pickled above 0."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        values = first(batch)
        if min(values) < 0:
            raise NeedsTwo("a", "b")
        if max(values) > 0:
            return {"y": lambda: None}  # type: ignore[dict-item]
        return super().predict(batch)


# Wrong at load.


class Refusing(Echo):
    """Wants a licence it does not get."""

    def load(self) -> None:
        raise Refused("a licence is needed", code="LICENSE_FAILED")


class BadLoad(Echo):
    def load(self) -> None:
        raise RuntimeError("the weights are not there")


class CrashLoad(Echo):
    """Dies in `load`, with status 3, unless the file `unless` exists."""

    def __init__(self, unless: str = "") -> None:
        self.unless = unless

    def load(self) -> None:
        if not self.unless or not Path(self.unless).exists():
            os._exit(3)


class SlowLoad(Echo):
    """Takes `seconds` to load."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds

    def load(self) -> None:
        time.sleep(self.seconds)


class BadWarmUp(Echo):
    """Loads, and then fails on the zeros of the warm-up."""

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        raise RuntimeError("cold")

"""How named arrays lie in a slot. Pure: no memory is owned here.

A block of tensors is a descriptor (JSON text: name, dtype, shape of each) followed by the arrays, each C-ordered,
little-endian, at a multiple of 64 bytes. A layout depends only on names, dtypes and shapes, so it is worked out
once per combination and then found in a dictionary, by the client under the arrays' signature, by the worker
under the descriptor's bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.errors import InvalidInput, ModelFailed
from workers.model import DTYPES, Array, TensorSpec

ALIGN = 64
MAX_CACHED = 4096
MAX_DIMS = 32

Signature = tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]


def align(n: int) -> int:
    return (n + ALIGN - 1) & -ALIGN


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` has the batch axis first; `offset` is in bytes from the start of the block."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`size`: bytes of the whole block. `rows`: length of the batch axis. `group`: layouts whose tensors may be
    joined along the batch axis have equal groups."""

    descriptor: bytes
    tensors: tuple[Tensor, ...]
    size: int
    rows: int
    group: object = field(compare=False)

    def views(self, buffer: Any, base: int) -> dict[str, Array]:
        """The arrays of the block that starts at byte `base` of `buffer`, without a copy."""
        return {t.name: np.ndarray(t.shape, t.dtype, buffer, base + t.offset) for t in self.tensors}


def signature(arrays: Mapping[str, Array]) -> Signature:
    return tuple([(name, a.dtype, a.shape) for name, a in arrays.items()])


def layout_of(sig: Signature) -> Layout:
    """The layout of arrays with this signature (dtypes in any byte order; they lie little-endian)."""
    descriptor = describe(sig)
    tensors, size = place(sig, align(len(descriptor)))
    group = tuple((t.name, t.dtype.name, t.shape[1:]) for t in tensors)
    rows = tensors[0].shape[0] if tensors else 1
    return Layout(descriptor, tensors, size, rows, group)


def describe(sig: Signature) -> bytes:
    return json.dumps([[name, dtype.name, list(shape)] for name, dtype, shape in sig], separators=(",", ":")).encode()


def undescribe(descriptor: bytes | str) -> Signature:
    return tuple((name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in json.loads(descriptor))


def place(sig: Signature, offset: int) -> tuple[tuple[Tensor, ...], int]:
    """Where each array lies when the first is put at `offset`, and where the last one ends."""
    tensors = []
    for name, dtype, shape in sig:
        tensors.append(Tensor(name, dtype.newbyteorder("<"), shape, offset))
        offset = align(offset + dtype.itemsize * _count(shape))
    return tuple(tensors), offset


class Layouts:
    """Layouts already worked out, by signature and by descriptor; forgotten all at once when there are too many."""

    __slots__ = ("_by_descriptor", "_by_signature")

    def __init__(self) -> None:
        self._by_signature: dict[Signature, Layout] = {}
        self._by_descriptor: dict[bytes, Layout] = {}

    def of(self, sig: Signature) -> Layout:
        layout = self._by_signature.get(sig)
        if layout is None:
            layout = self._by_signature[sig] = layout_of(sig)
            _bound(self._by_signature)
        return layout

    def parse(self, descriptor: bytes) -> Layout:
        layout = self._by_descriptor.get(descriptor)
        if layout is None:
            layout = self._by_descriptor[descriptor] = layout_of(undescribe(descriptor))
            _bound(self._by_descriptor)
        return layout


class InputChecks:
    """A model's declared inputs, held against what callers send; a signature that passed once passes again.
    `refusal`: why nothing passes, whatever it is."""

    __slots__ = ("_max_rows", "_passed", "_refusal", "_specs")

    def __init__(self, specs: Sequence[TensorSpec], max_rows: int, refusal: str = "") -> None:
        self._refusal = refusal
        self._specs = specs
        self._max_rows = max_rows
        self._passed: dict[Signature, Layout] = {}

    def layout(self, arrays: Mapping[str, Array]) -> Layout:
        """The layout of `arrays`, or `InvalidInput` naming the tensor and what would be right."""
        sig = signature(arrays)
        layout = self._passed.get(sig)
        if layout is None:
            self._check(sig)
            layout = self._passed[sig] = layout_of(sig)
            _bound(self._passed)
        return layout

    def _check(self, sig: Signature) -> None:
        if self._refusal:
            raise InvalidInput(self._refusal)
        given = {name: (dtype, shape) for name, dtype, shape in sig}
        wanted = [s.name for s in self._specs]
        for name in given:
            if name not in wanted:
                inputs = f"the inputs are {', '.join(map(repr, wanted))}" if wanted else "the model takes none"
                raise InvalidInput(f"there is no input {name!r}; {inputs}")
        rows: int | None = None
        for spec in self._specs:
            if spec.name not in given:
                raise InvalidInput(f"input {spec.name!r} is missing")
            dtype, shape = given[spec.name]
            fault = tensor_fault(spec, dtype, shape)
            if fault:
                raise InvalidInput(f"input {fault}")
            if rows is not None and shape[0] != rows:
                raise InvalidInput(f"input {spec.name!r} has {shape[0]} rows, {wanted[0]!r} has {rows}")
            rows = shape[0]
        if rows is not None and not 1 <= rows <= self._max_rows:
            raise InvalidInput(f"{rows} rows, and between 1 and {self._max_rows} can be taken at once")


class OutputChecks:
    """What a model declares, held against what it answers; an answer like one that passed passes again."""

    __slots__ = ("_passed", "_specs")

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._passed: dict[tuple[object, ...], bool] = {}

    def check(self, outputs: Mapping[str, Array], rows: int) -> Mapping[str, Array]:
        """`outputs` if they are as declared, `rows` rows each; `ModelFailed` says what is off."""
        try:
            key = (rows, *[(name, a.dtype, a.shape) for name, a in outputs.items()])
            if key in self._passed:
                return outputs
        except (AttributeError, TypeError):
            # Not even named arrays; the check below finds the words.
            key = ()
        check_outputs(self._specs, outputs, rows)
        self._passed[key] = True
        _bound(self._passed)
        return outputs


def check_outputs(specs: Sequence[TensorSpec], outputs: object, rows: int) -> None:
    """Raise `ModelFailed` unless a model answered what it had declared: named arrays of `rows` rows each."""
    if not isinstance(outputs, Mapping):
        raise ModelFailed(f"the model answered a {type(outputs).__name__}, not named arrays")
    for spec in specs:
        if spec.name not in outputs:
            raise ModelFailed(f"the model answered without output {spec.name!r}")
        array = outputs[spec.name]
        if not isinstance(array, np.ndarray):
            raise ModelFailed(f"output {spec.name!r} is a {type(array).__name__}, not an array")
        if array.ndim == 0 or array.shape[0] != rows:
            count = array.shape[0] if array.ndim else "no"
            raise ModelFailed(f"output {spec.name!r} has {count} rows for a batch of {rows}")
        fault = tensor_fault(spec, array.dtype, array.shape)
        if fault:
            raise ModelFailed(f"output {fault}")
    if len(outputs) != len(specs):
        declared = [spec.name for spec in specs]
        extra = next(name for name in outputs if name not in declared)
        raise ModelFailed(f"the model answered an undeclared output {extra!r}")


def tensor_fault(spec: TensorSpec, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """What is wrong with a tensor of this dtype and shape (batch axis included) for `spec`; empty if nothing."""
    if dtype.name != spec.dtype or dtype.name not in DTYPES:
        return f"{spec.name!r} is {dtype.name}, declared {spec.dtype}"
    if len(shape) > MAX_DIMS or len(shape) != len(spec.shape) + 1 or _differs(spec.shape, shape[1:]):
        return f"{spec.name!r} has shape {list(shape)}, declared {[-1, *spec.shape]}"
    return ""


def _differs(wanted: tuple[int, ...], given: tuple[int, ...]) -> bool:
    return any(w not in (-1, g) for w, g in zip(wanted, given, strict=True))


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for length in shape:
        n *= length
    return n


def _bound(cache: dict[Any, Any]) -> None:
    if len(cache) > MAX_CACHED:
        cache.clear()

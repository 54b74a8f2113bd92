"""How a body becomes tensors and an answer becomes a body: plain functions, no I/O, no HTTP.

A codec runs where it suits: in the web process for small bodies, in the worker for large ones. Both sides know
it by its name, and a record carries its `wire_id`.

`json-row` is one row as a JSON object, a member for each tensor: `{"features":[1,2,3,4]}` in,
`{"scores":[5.25,5.25]}` out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from workers import strict_json
from workers.errors import InvalidInput, InvalidOutput
from workers.model import DTYPES, Array, TensorSpec


@dataclass(frozen=True, slots=True)
class Codec:
    """`decode` makes read-only arrays of shape (rows, *spec.shape) from a body, or raises `InvalidInput`;
    `encode` makes the body of an answer from such arrays, or raises `InvalidOutput`."""

    name: str
    wire_id: int
    content_type: str
    decode: Callable[[bytes | memoryview, Sequence[TensorSpec]], dict[str, Array]]
    encode: Callable[[Mapping[str, Array], Sequence[TensorSpec]], bytes]


def decode_row(body: bytes | memoryview, inputs: Sequence[TensorSpec]) -> dict[str, Array]:
    """One row; members that no spec names are ignored."""
    try:
        members = strict_json.loads(body)
    except strict_json.InvalidJSON:
        raise InvalidInput("invalid json") from None
    if not isinstance(members, dict):
        members = {}  # then the first tensor is missing
    return {spec.name: _array(members.get(spec.name), spec) for spec in inputs}


def encode_row(outputs: Mapping[str, Array], specs: Sequence[TensorSpec]) -> bytes:
    """The first row of `outputs`, members in the order of `specs`.

    A float16 or float32 is written as the shortest text that reads back as the same float16 or float32.
    """
    members = {spec.name: _nested_lists(outputs[spec.name][0]) for spec in specs}
    try:
        return strict_json.dumps(members)
    except ValueError:
        culprit = next((name for name in members if not np.isfinite(outputs[name]).all()), "the answer")
        raise InvalidOutput(f"{culprit!r} holds NaN or Infinity, for which JSON has no form") from None


# What a member of a tensor of each dtype may be in JSON: how it is packed, the types it is read as (a bool is
# an int to Python, but not here), what it is called.
_NUMBERS = frozenset((int, float))
_INTEGERS = frozenset((int,))
_BOOLEANS = frozenset((bool,))
_FORMS: dict[str, tuple[str, frozenset[type], str]] = {
    "bool": ("?", _BOOLEANS, "boolean"),
    "uint8": ("B", _INTEGERS, "integer"),
    "uint16": ("H", _INTEGERS, "integer"),
    "uint32": ("I", _INTEGERS, "integer"),
    "uint64": ("Q", _INTEGERS, "integer"),
    "int8": ("b", _INTEGERS, "integer"),
    "int16": ("h", _INTEGERS, "integer"),
    "int32": ("i", _INTEGERS, "integer"),
    "int64": ("q", _INTEGERS, "integer"),
    "float16": ("e", _NUMBERS, "number"),
    "float32": ("f", _NUMBERS, "number"),
    "float64": ("d", _NUMBERS, "number"),
}
_LISTS = frozenset((list,))
_DTYPES = {name: np.dtype(name) for name in DTYPES}


def _array(value: object, spec: TensorSpec) -> Array:
    """`value`, nested lists, as an array of shape (1, *spec.shape); level by level, each in one pass of C."""
    letter, types, _ = _FORMS[spec.dtype]
    if type(value) is list and spec.shape == (len(value),) and types.issuperset(map(type, value)):
        # One dimension, as most have.
        try:
            return np.ndarray((1, len(value)), _DTYPES[spec.dtype], _pack(letter, value))
        except (struct.error, OverflowError):
            raise _misfit(spec) from None
    members: list[object] = [value]
    shape = [1]
    for length in spec.shape:
        if not _LISTS.issuperset(map(type, members)):
            raise _misfit(spec)
        lists: list[list[object]] = members  # type: ignore[assignment]
        lengths = set(map(len, lists))
        found = lengths.pop() if lengths else max(length, 0)
        if lengths or (found != length and length != -1):
            raise _misfit(spec)
        shape.append(found)
        members = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
    if not types.issuperset(map(type, members)):
        raise _misfit(spec)
    try:
        packed = _pack(letter, members)
    except (struct.error, OverflowError):
        raise _misfit(spec) from None
    return np.ndarray(shape, spec.dtype, packed)


def _misfit(spec: TensorSpec) -> InvalidInput:
    _, _, noun = _FORMS[spec.dtype]
    if not spec.shape:
        return InvalidInput(f"{spec.name!r} must be {'an' if noun == 'integer' else 'a'} {noun}")
    if spec.shape == (-1,):
        return InvalidInput(f"{spec.name!r} must hold {noun}s")
    lengths = " x ".join("n" if length == -1 else str(length) for length in spec.shape)
    return InvalidInput(f"{spec.name!r} must hold {lengths} {noun}{'' if spec.shape == (1,) else 's'}")


_NARROW = {"e", "f"}  # dtype.char of float16 and float32, which are also their letters to `struct`


def _nested_lists(row: Array) -> object:
    """A row as Python values; a narrow float becomes the double whose text is the narrow one's shortest."""
    if row.dtype.char not in _NARROW:
        return row.tolist()
    flat = row if row.ndim == 1 else row.ravel()
    shortest = [float(str(x)) for x in flat]
    # numpy's shortest text is for a reader that rounds once. Most JSON readers round twice, to double and then
    # down; for the few where that ends elsewhere (7.038531e-26 is one) nine digits are safe with either.
    if _pack(flat.dtype.char, shortest) != flat.tobytes():
        shortest = [
            short if type(x)(short) == x else float(f"{float(x):.9g}") for short, x in zip(shortest, flat, strict=True)
        ]
    return shortest if row.ndim == 1 else np.array(shortest).reshape(row.shape).tolist()


def _pack(letter: str, values: Sequence[object]) -> bytes:
    """Standard sizes (`=`): only these refuse what would become infinite, or does not fit the integer."""
    return struct.pack(f"={len(values)}{letter}", *values)


JSON_ROW = Codec("json-row", 1, "application/json", decode_row, encode_row)
CODECS: dict[str, Codec] = {codec.name: codec for codec in (JSON_ROW,)}
BY_WIRE_ID: dict[int, Codec] = {codec.wire_id: codec for codec in CODECS.values()}

"""How a body becomes tensors and an answer becomes a body: plain functions, no I/O, no HTTP.

A codec runs where it suits: in the web process for small bodies, in the worker for large ones. Both sides know
it by its name, and a record carries its `wire_id`.

`json-row` is one row as a JSON object, a member for each tensor: `{"features":[1,2,3,4]}` in,
`{"scores":[5.25,5.25]}` out.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import orjson

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
    raw = body if type(body) is bytes else bytes(body)
    try:
        members = strict_json.loads(raw, wide_integers=False)  # to no dtype is one of those more than its double
    except strict_json.InvalidJSON:
        raise InvalidInput("invalid json") from None
    if not isinstance(members, dict):
        members = {}  # then the first tensor is missing
    literals = len(raw) < _LONG or _may_list_literals(raw)
    arrays = {}
    for spec in inputs:
        arrays[spec.name] = _array(members.get(spec.name), spec, literals)
    return arrays


def encode_row(outputs: Mapping[str, Array], specs: Sequence[TensorSpec]) -> bytes:
    """The first row of `outputs`, members in the order of `specs`.

    A float16 or float32 is written as the shortest text that reads back as the same float16 or float32.
    """
    members: dict[str, bytes] = {}
    try:
        for spec in specs:
            name = spec.name
            members[name] = _member(name) + _row_text(outputs[name][0])
    except ValueError:
        names = [spec.name for spec in specs]
        culprit = next((name for name in names if not np.isfinite(outputs[name]).all()), "the answer")
        raise InvalidOutput(f"{culprit!r} holds NaN or Infinity, for which JSON has no form") from None
    return b"{%b}" % b",".join(members.values())


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


# From how many bytes of body on it is cheaper to look for literals than at every member.
_LONG = 256


def _may_list_literals(raw: bytes) -> bool:
    """Whether some list of a JSON text may hold true, false or null: a u or an l behind the first bracket."""
    start = max(raw.find(b"["), 0)
    return raw.find(b"u", start) >= 0 or raw.find(b"l", start) >= 0


def _array(value: object, spec: TensorSpec, literals: bool) -> Array:
    """`value`, nested lists, as an array of shape (1, *spec.shape); level by level, each in one pass of C.

    Without `literals` a list cannot hold a bool, which is all that `_pack` would wrongly take for a number.
    """
    letter, types, _ = _FORMS[spec.dtype]
    shape = spec.shape
    look = literals or not shape or types is _BOOLEANS
    if type(value) is list and shape == (len(value),) and (not look or types.issuperset(map(type, value))):
        # One dimension, as most have.
        try:
            return np.ndarray((1, len(value)), _DTYPES[spec.dtype], _packer(letter, len(value))(*value))
        except (struct.error, OverflowError):
            raise _misfit(spec) from None
    members: list[object] = [value]
    lengths_found = [1]
    for length in shape:
        if not _LISTS.issuperset(map(type, members)):
            raise _misfit(spec)
        lists: list[list[object]] = members  # type: ignore[assignment]
        lengths = set(map(len, lists))
        found = lengths.pop() if lengths else max(length, 0)
        if lengths or (found != length and length != -1):
            raise _misfit(spec)
        lengths_found.append(found)
        members = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
    if look and not types.issuperset(map(type, members)):
        raise _misfit(spec)
    try:
        packed = _pack(letter, members)
    except (struct.error, OverflowError):
        raise _misfit(spec) from None
    return np.ndarray(lengths_found, spec.dtype, packed)


def _misfit(spec: TensorSpec) -> InvalidInput:
    _, _, noun = _FORMS[spec.dtype]
    if not spec.shape:
        return InvalidInput(f"{spec.name!r} must be {'an' if noun == 'integer' else 'a'} {noun}")
    if spec.shape == (-1,):
        return InvalidInput(f"{spec.name!r} must hold {noun}s")
    lengths = " x ".join("n" if length == -1 else str(length) for length in spec.shape)
    return InvalidInput(f"{spec.name!r} must hold {lengths} {noun}{'' if spec.shape == (1,) else 's'}")


@lru_cache(1024)
def _member(name: str) -> bytes:
    return strict_json.dumps(name) + b":"


# By dtype.char, which for the floats is also their letter to `struct`.
_WHOLE = frozenset("?bBhHiIlLqQ")
_NARROW = frozenset("ef")
_E, _N = b"en"


def _row_text(row: Array) -> bytes:
    """The JSON of a row, or a `ValueError`; the same text as that of `_nested_lists`, mostly by orjson.

    orjson writes a float16 as if it were a float32, has read foreign bytes as native ones (3.10.0), and refuses what
    is not laid out in C order.
    """
    dtype = row.dtype
    char = dtype.char
    if dtype.isnative and (char in _WHOLE or char == "f" or char == "d"):
        try:
            text = orjson.dumps(row, None, orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:
            return _exact_text(row)
        if char in _WHOLE:
            return text
        if _N in text:  # null
            raise ValueError("NaN or Infinity")
        if _E not in text and text.find(b"0.0000") < 0:
            # Decimals of at least 0.0001, which have no other form. A float32 is safe here with a reader that rounds
            # twice, too: its nine digits at most end at the twelfth place or before. Such a decimal that is not
            # itself a middle between two float32 (25 bits times a power of two) is further from it than half a bit of
            # a double, for 5**12 * 2**25 < 2**53.
            return text
        return _exponents_as_python_has_them(text, row) or _exact_text(row)
    return _exact_text(row)


_SMALL = re.compile(rb"0\.0000(?<![0-9]0\.0000)([0-9]+)")


def _exponents_as_python_has_them(text: bytes, row: Array) -> bytes | None:
    """`text` with 0.000012 as 1.2e-05 and 1e-7 as 1e-07; None where more than that may be to do."""
    if text.count(b"e") != text.count(b"e-"):
        return None
    if row.dtype.char == "f":
        flat = orjson.loads(b"[" + text.translate(None, b"[]") + b"]")
        if _pack("f", flat) != row.tobytes():
            return None
    head, *tails = _SMALL.sub(_with_exponent, text).split(b"e-")
    return b"e-".join([head, *[tail if tail[1:2].isdigit() else b"0" + tail for tail in tails]])


def _with_exponent(small: re.Match[bytes]) -> bytes:
    decimals = small[1]
    digits = decimals.lstrip(b"0")
    point = b"." if len(digits) > 1 else b""
    return b"%b%b%be-%02d" % (digits[:1], point, digits[1:], 5 + len(decimals) - len(digits))


def _exact_text(row: Array) -> bytes:
    return strict_json.exact_dumps(_nested_lists(row))


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
    return _packer(letter, len(values))(*values)


@lru_cache(1024)
def _packer(letter: str, length: int) -> Callable[..., bytes]:
    """Standard sizes (`=`): only these refuse what would become infinite, or does not fit the integer."""
    return struct.Struct(f"={length}{letter}").pack


JSON_ROW = Codec("json-row", 1, "application/json", decode_row, encode_row)
CODECS: dict[str, Codec] = {codec.name: codec for codec in (JSON_ROW,)}
BY_WIRE_ID: dict[int, Codec] = {codec.wire_id: codec for codec in CODECS.values()}

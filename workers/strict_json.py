"""JSON as RFC 8259 has it, with nothing let through that only Python would read or write.

Two engines. `exact_loads` and `exact_dumps` are the standard library's C scanner and encoder with what they are lax
about refused: NaN and Infinity, numbers that overflow to infinity, repeated keys, lone surrogates. They say what is
right, and word every refusal. `loads` and `dumps` ask orjson first, which takes a fifth of the time or less (a row
of 1,024 floats is read in 20 us, not 170), and whatever it refuses is done again by the exact ones.

orjson is lax in other ways, and each has its guard: a test in C over the whole that may cry wolf (a long number in
a string), which costs time only, but never misses.

- It keeps the last of repeated keys. Every member has a colon: as many distinct keys as colons leave no room for a
  repetition; else the value is written again, and a member that was lost is a colon that is lost.
- It reads an integer beyond 64 bits as a double. Such a one has 19 digits or more, not behind a point.
- It nests deeper than `max_depth`.
- It writes NaN and Infinity as null. Where there is a null, the text is read again and compared.
- It writes what JSON has no form for (an `Enum`, a `UUID`). `marshal` takes, of all that orjson writes, the plain
  types alone, and no subclasses.

The text of a float is orjson's own (`0.00001`, `1e-7`, where Python has `1e-05`, `1e-07`): as many digits, and the
same number.

Pure functions over bytes; used by codecs in web processes and workers alike.
"""

from __future__ import annotations

import json
import marshal
import re
from array import array
from collections.abc import Callable, Iterable
from itertools import accumulate

import orjson


class InvalidJSON(ValueError):
    """The bytes are not strictly JSON; the text is a short reason."""


def loads(data: bytes | bytearray | memoryview, *, max_depth: int = 64, wide_integers: bool = True) -> object:
    """The value of a JSON text in UTF-8, without byte order mark.

    `max_depth` is how deep arrays and objects may nest; up to about 900, where Python's own recursion limit
    comes first. Who makes doubles of all numbers, or takes integers of 64 bits at most, may do without
    `wide_integers`: one beyond 64 bits may then come as the double nearest to it. Raises `InvalidJSON`, and
    nothing else.
    """
    raw = data if type(data) is bytes else bytes(data)
    try:
        value: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return exact_loads(raw, max_depth=max_depth)
    if type(value) is float:  # maybe an integer, with nothing before it that `_LONG_INTEGER` could be known by
        return exact_loads(raw, max_depth=max_depth)
    colons = raw.count(b":")
    if (
        (colons and not (type(value) is dict and len(value) == colons) and _may_repeat_a_key(raw, value, colons))
        or (wide_integers and raw.translate(_LITERALS).find(_LONG_INTEGER) >= 0)
        or (len(raw) > 2 * max_depth and _is_deeper(raw, max_depth))
    ):
        return exact_loads(raw, max_depth=max_depth)
    return value


def dumps(obj: object) -> bytes:
    """Compact JSON in raw UTF-8, keys in insertion order.

    `ValueError` on NaN, Infinity, a lone surrogate or a cycle, `TypeError` on what JSON has no form for.
    """
    try:
        text = orjson.dumps(obj)  # first: it is the one to end early in a cycle
        marshal.dumps(obj, _BY_VALUE)  # type: ignore[arg-type]  # whether it takes it is the question
    except (TypeError, ValueError):
        return exact_dumps(obj)
    if text.find(b"null") >= 0 and orjson.loads(text) != obj:
        return exact_dumps(obj)
    return text


def _may_repeat_a_key(raw: bytes, value: object, colons: int) -> bool:
    """A colon in a string stays one when written again, and none comes of anything else but its own escape."""
    if raw.find(b"\\u003") >= 0:
        return True
    try:
        return orjson.dumps(value).count(b":") != colons
    except orjson.JSONEncodeError:  # nested too deep for it
        return True


# An integer that may be beyond 64 bits, with every digit read as 0, and all that may stand before one as a comma.
_LITERALS = bytes(0x30 if byte in b"0123456789" else 0x2C if byte in b",:[- \t\n\r" else byte for byte in range(256))
_LONG_INTEGER = b"," + b"0" * 19

_BY_VALUE = 2  # a version of marshal's that keeps no table of what it has seen


def exact_loads(data: bytes | bytearray | memoryview, *, max_depth: int = 64) -> object:
    """What `loads` does, by the standard library."""
    raw = bytes(data)  # no copy where it is bytes already
    try:
        text = raw.decode().strip(_WHITESPACE)
        value, end = _raw_decode(text)
    except UnicodeDecodeError:
        raise InvalidJSON("not UTF-8") from None
    except InvalidJSON:
        raise
    except json.JSONDecodeError as error:
        raise InvalidJSON(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise InvalidJSON("nested too deep") from None
    except ValueError:  # int() refuses more digits than sys.get_int_max_str_digits()
        raise InvalidJSON("a number is too long") from None
    if end != len(text):
        raise InvalidJSON(f"more text after the value at character {end}")
    if _is_deeper(raw, max_depth):
        raise InvalidJSON("nested too deep")
    if b"\\u" in raw and _SURROGATE(raw) and not _SURROGATES_PAIRED(raw):
        raise InvalidJSON("lone surrogate")
    digits = raw.translate(_DIGITS, b"+")
    if (_BIG_EXPONENT in digits or _MANY_DIGITS in digits) and not _is_finite(value):
        raise InvalidJSON("a number is out of range")
    return value


def exact_dumps(obj: object) -> bytes:
    """What `dumps` does, by the standard library."""
    try:
        return "".join(_encode(obj, 0)).encode()
    except RecursionError:
        raise ValueError("nested too deep, or in a cycle") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise InvalidJSON("duplicate key")
    return members


def _no_constant(literal: str) -> object:
    raise InvalidJSON(f"{literal} is not JSON")


_WHITESPACE = " \t\n\r"
_raw_decode = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant).raw_decode


def _encoder() -> Callable[[object, int], Iterable[str]]:
    """The standard library's encoder in C, made once: its own classes make one anew for every text."""
    how = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return lambda obj, _: how.iterencode(obj)
    return make(  # type: ignore[no-any-return]
        None, how.default, json.encoder.encode_basestring, None, ":", ",", False, False, False
    )


_encode = _encoder()


# Depth: the scanner has found the text balanced, and an opening bracket steps one down, a closing one up.
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STEPS = bytes(1 if byte in b"[{" else 0xFF if byte in b"]}" else byte for byte in range(256))
_NO_STEP = bytes(byte for byte in range(256) if byte not in b"[{]}")


def _is_deeper(raw: bytes, max_depth: int) -> bool:
    """Whether a valid text nests deeper."""
    return raw.count(b"[") + raw.count(b"{") > max_depth and _depth(raw) > max_depth


def _depth(raw: bytes) -> int:
    if b"\\" in raw:
        raw = _ESCAPE.sub(b"", raw)  # then every quote left opens or closes a string
    outside_strings = b"".join(raw.split(b'"')[::2])
    return max(accumulate(array("b", outside_strings.translate(_STEPS, _NO_STEP))), default=0)


# Surrogates: in valid text a backslash is always an escape, so the whole can be matched escape by escape.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]").search
_SURROGATES_PAIRED = re.compile(
    rb"(?: [^\\]++ | \\[^u] | \\u(?![dD][89a-fA-F]) | \\u[dD][89abAB]..\\u[dD][c-fC-F] )*+",
    re.VERBOSE | re.DOTALL,
).fullmatch


# Range: with every digit read as 0 and plus signs gone, a double can only overflow with an exponent of three
# digits or more, or with at least 309 - 99 digits before its point.
_DIGITS = bytes(0x30 if byte in b"0123456789" else 0x65 if byte in b"eE" else byte for byte in range(256))
_BIG_EXPONENT = b"e000"
_MANY_DIGITS = b"0" * 200


def _is_finite(value: object) -> bool:
    try:
        _encode(value, 0)
    except ValueError:
        return False
    return True

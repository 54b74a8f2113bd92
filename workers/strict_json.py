"""JSON as RFC 8259 has it, with nothing let through that only Python would read or write.

The standard library's C scanner and encoder do the work, and each is lax in its own way: NaN and Infinity,
numbers that overflow to infinity, repeated keys, lone surrogates. Exact checks for these in Python would cost
more than the parse. So each is guarded by a test that runs in C over the whole text, may cry wolf (a key that
holds `e1234`) but never misses, and only then is the exact check made.

Pure functions over bytes; used by codecs in web processes and workers alike.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable
from itertools import accumulate


class InvalidJSON(ValueError):
    """The bytes are not strictly JSON; the text is a short reason."""


def loads(data: bytes | bytearray | memoryview, *, max_depth: int = 64) -> object:
    """The value of a JSON text in UTF-8, without byte order mark.

    `max_depth` is how deep arrays and objects may nest; up to about 900, where Python's own recursion limit
    comes first. Raises `InvalidJSON`, and nothing else.
    """
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
    if raw.count(b"[") + raw.count(b"{") > max_depth and _depth(raw) > max_depth:
        raise InvalidJSON("nested too deep")
    if b"\\u" in raw and _SURROGATE(raw) and not _SURROGATES_PAIRED(raw):
        raise InvalidJSON("lone surrogate")
    digits = raw.translate(_DIGITS, b"+")
    if (_BIG_EXPONENT in digits or _MANY_DIGITS in digits) and not _is_finite(value):
        raise InvalidJSON("a number is out of range")
    return value


def dumps(obj: object) -> bytes:
    """Compact JSON in raw UTF-8, keys in insertion order.

    `ValueError` on NaN, Infinity, a lone surrogate or a cycle, `TypeError` on what JSON has no form for.
    """
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


def _depth(raw: bytes) -> int:
    """How deep a valid text nests."""
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

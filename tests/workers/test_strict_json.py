from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.strict_json import InvalidJSON, dumps, loads

# The machine may be busy with other things: time is no property of an example.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

GOOD = {
    b"0": 0,
    b"-0": 0,
    b"-0.0": -0.0,
    b"1e308": 1e308,
    b"1E+0000000308": 1e308,
    b"1e-999": 0.0,
    b"0." + b"3" * 500: 1 / 3,
    b"1" * 400: int("1" * 400),
    b"1" * 300 + b".5e-200": float("1" * 300 + ".5e-200"),
    b' \t\r\n[ 1 ,\n{"a" : null } ]\n': [1, {"a": None}],
    b"true": True,
    b'""': "",
    b'"e1234"': "e1234",
    b'{"E999":"e+9999"}': {"E999": "e+9999"},
    rb'"\ud83d\ude00\u00E9\n\/"': "\U0001f600\u00e9\n/",
    rb'"\\ud800"': "\\ud800",
    rb'"\\\\ud800 \ud83d\ude00"': "\\\\ud800 \U0001f600",
    '"\u2028\x7f\U0001f600"'.encode(): "\u2028\x7f\U0001f600",
    b'"' + b"[" * 500 + b'"': "[" * 500,
    rb'["\"[[[[[[[[\\",{"]":"}"}]': ['"[[[[[[[[\\', {"]": "}"}],
    b'{"":1,"a":{"":1,"a":2}}': {"": 1, "a": {"": 1, "a": 2}},
}

BAD = [
    b"",
    b" ",
    b"nul",
    b"True",
    b"NaN",
    b"-NaN",
    b"Infinity",
    b'{"x":[-Infinity]}',
    b"[nan]",
    b"1e999",
    b"-1e999",
    b"[1E+309]",
    b'{"x":[1e00000000000400]}',
    b"9" * 309 + b".0",
    b"1" * 250 + b"e99",
    b"1" * 5000,
    b"[-" + b"9" * 5000 + b"]",
    b"01",
    b"+1",
    b".5",
    b"1.",
    b"1e",
    b"1e+",
    b"- 1",
    b"0x10",
    b"1_000",
    "\u0661".encode(),
    "\uff11".encode(),
    b"[1,]",
    b"[,1]",
    b"[1 2]",
    b"[1",
    b"]",
    b"[1]]",
    b'{"a":1,}',
    b'{"a" 1}',
    b"{a:1}",
    b"{'a':1}",
    b"{1:1}",
    b'{"a":1,"a":1}',
    b'[{"b":{"a":1,"\\u0061":2}}]',
    b'"a',
    b'"\n"',
    b'"\x00"',
    b'"\x1f"',
    b'"\\x41"',
    b'"\\u12"',
    b'"\\u+123"',
    b'"\\u 123"',
    b"\x00",
    b"1\x00",
    b"[1]//",
    b"/**/1",
    b"1 2",
    b"\x0b1",
    b"\x0c1",
    b"\xa01",
    "\u00a01".encode(),
    "1\u2003".encode(),
    b"\xef\xbb\xbf1",
    "[1]".encode("utf-16"),
    "[1]".encode("utf-16-le"),
    "[1]".encode("utf-16-be"),
    "[1]".encode("utf-32"),
    b'"\xff"',
    b'"\xc0\x80"',
    b'"\xe9"',
    b'"\xed\xa0\x80"',
    b'"\xed\xa0\xbd\xed\xb8\x80"',
    b'"\xf4\x90\x80\x80"',
    rb'"\ud800"',
    rb'"\uDC00"',
    rb'"\ud800\ud800\udc00"',
    rb'"\ud83d\\ude00"',
    rb'"\ud83d\n"',
    rb'"\\\ud800"',
    rb'"\ude00\ud83d"',
    rb'{"\udfff":1}',
    b"[" * 65 + b"]" * 65,
    b'{"a":' * 65 + b"1" + b"}" * 65,
    b"[" * 1000,
    b"[" * 1000 + b"]" * 1000,
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000,
]


@pytest.mark.parametrize(("text", "value"), GOOD.items(), ids=lambda x: repr(x)[:40])
def test_strict_json_is_read(text: bytes, value: object) -> None:
    read = loads(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", BAD, ids=lambda x: repr(x)[:40])
def test_all_else_is_refused_with_a_short_reason(text: bytes) -> None:
    with pytest.raises(InvalidJSON) as caught:
        loads(text)
    assert 0 < len(str(caught.value)) < 100


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 200_000, b"[[]," * 100_000], ids=["arrays", "objects", "lists"]
)
def test_deep_nesting_is_refused_in_milliseconds(text: bytes) -> None:
    began = time.perf_counter()
    with pytest.raises(InvalidJSON):
        loads(text)
    assert time.perf_counter() - began < 0.5


def test_depth_counts_what_nests_and_not_what_lies_side_by_side() -> None:
    assert loads(b"[" * 64 + b"]" * 64)
    assert loads(b"[" + b",".join([b"[]"] * 500) + b"]") == [[]] * 500
    assert loads(b'["' + b"[" * 70 + rb'\"[", ' + b"[" * 63 + b"]" * 63 + b"]")
    with pytest.raises(InvalidJSON, match="too deep"):
        loads(b"[[],[" + b"{}," * 70 + b"[]]]", max_depth=2)
    assert loads(b"[[],[" + b"{}," * 70 + b"[]]]", max_depth=3)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_is_read(kind: type) -> None:
    assert loads(kind(b'{"a":[1,"\xc3\xa9"]}')) == {"a": [1, "\u00e9"]}


def test_output_is_compact_ordered_and_raw_utf8() -> None:
    assert (
        dumps({"b": [1, 2.5, None], "a": "\u00e9\U0001f600\u2028"})
        == '{"b":[1,2.5,null],"a":"\u00e9\U0001f600\u2028"}'.encode()
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "\ud800", {"\udfff": 1}, [[{"a": math.nan}]]])
def test_what_is_not_json_is_not_written(value: object) -> None:
    with pytest.raises(ValueError):
        dumps(value)


def test_a_cycle_is_not_written() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(ValueError):
        dumps(cycle)


def test_refusals_leave_nothing_behind_that_spoils_the_next_call() -> None:
    shared = [1]
    with pytest.raises(ValueError):
        dumps([shared, math.nan])
    assert dumps([shared, shared]) == b"[[1],[1]]"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@unhurried
@given(JSON_VALUES)
def test_what_is_written_reads_back_the_same(value: object) -> None:
    assert loads(dumps(value)) == value
    assert loads(json.dumps(value).encode()) == value


@unhurried
@given(st.text(alphabet='[]{}",:\\ue+d8Dc0159.-aN\u00e9 ', max_size=40))
def test_it_never_reads_what_the_lax_parser_refuses_nor_refuses_without_cause(text: str) -> None:
    try:
        expected: object = json.loads(text)
        json.dumps(expected, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        expected = InvalidJSON
    try:
        read = loads(text.encode())
    except InvalidJSON:
        # What the lax parser reads and we may refuse: repeated keys alone (nesting stays below the limit here).
        assert expected is InvalidJSON or _has_repeated_keys(text)
    else:
        assert read == expected


def _has_repeated_keys(text: str) -> bool:
    repeated = False

    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal repeated
        repeated |= len(dict(pairs)) != len(pairs)
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    return repeated

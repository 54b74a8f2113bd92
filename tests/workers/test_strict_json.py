from __future__ import annotations

import enum
import json
import math
import re
import time
import uuid
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import date

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.strict_json import InvalidJSON, dumps, exact_dumps, exact_loads, loads

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


# The fast engine beside the exact one


def outcome(function: object, *args: object, **options: object) -> object:
    """What a call returns, in a form that tells 1 from 1.0 and 0.0 from -0.0, or the error it raises."""
    try:
        return repr(function(*args, **options))  # type: ignore[operator]
    except (ValueError, TypeError) as error:
        return type(error), str(error)


def assert_read_as_exactly(text: bytes) -> None:
    assert outcome(loads, text) == outcome(exact_loads, text)
    assert outcome(loads, text, max_depth=2) == outcome(exact_loads, text, max_depth=2)


@pytest.mark.parametrize(
    "text",
    [
        *GOOD,
        *BAD,
        b"18446744073709551615",
        b"18446744073709551616",
        b"-9223372036854775808",
        *(
            before + number + after
            for number in (b"-9223372036854775809", b"18446744073709551616", b"9" * 30)
            for before, after in (
                (b"", b""),
                (b"\t", b"\n"),
                (b"[", b"]"),
                (b"[ ", b"]"),
                (b"[0,", b"]"),
                (b"[0,\r\n", b" ]"),
                (b'{"a":', b"}"),
                (b'{"a": ', b"}"),
            )
        ),
        b"[1.7976931348623157e308,1.7976931348623158e308,4.9e-324,2.4703282292062328e-324]",
        b"[1.7976931348623159e308]",
        b"[0,-0,0.0,-0.0,0e5,-0e-5,1E5,1e-99999999999999999999,0e99999999999999999999]",
        b"[0.00012345678901234567,9007199254740993.0,9007199254740992.99999999999999999999999]",
        b'{"a":{"b":1},"b":[{"b":1},{"b":2}]}',
        b'{"a":"x:y","b":1}',
        b'{"a:a":"x:y:","b":{}}',
        b'{"a":1,"a":":"}',
        b'{"a:b":1,"a:b":2}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":1,"a":2,"b":"\\u003a"}',
        b'{"a":1,"a":2,"b":"\\u003A"}',
        b'[{"a":1,"a":2},"\\u003a"]',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":1,"a":{"b":1}}',
        b"[[[]]]",
        b'{"a":[{}]}',
        b"[[],[],[[]]]",
    ],
    ids=lambda x: repr(x)[:40],
)
def test_the_fast_engine_reads_what_the_exact_one_reads(text: bytes) -> None:
    assert_read_as_exactly(text)


@unhurried
@given(st.data())
def test_texts_and_what_is_nearly_one_are_read_as_exactly(data: st.DataObject) -> None:
    text = data.draw(LITERALS_NESTED)
    assert_read_as_exactly(text.encode())
    at = data.draw(st.integers(0, len(text)))
    mutated = text[:at] + data.draw(st.sampled_from(PIECES)) + text[at + data.draw(st.integers(0, 2)) :]
    assert_read_as_exactly(mutated.encode())


PIECES = [
    *'[]{}",:\\-+.eE0159 \t\n',
    "",
    "null",
    "true",
    "NaN",
    "Infinity",
    "\\u003a",
    "\\ud800",
    "\\ude00",
    '"a":',
    "\ufeff",
    "\x00",
]
DIGITS = st.text("0123456789", min_size=1, max_size=25)
NUMBERS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-"]),
    st.just("0") | DIGITS.map(lambda digits: digits.lstrip("0") or "0"),
    st.just("") | DIGITS.map(".{}".format),
    st.just("") | st.from_regex(r"\A[eE][+-]?[0-9]{1,3}\Z"),
)
STRINGS = st.text(st.sampled_from('a:b[{\u00e9,"\\'), max_size=4).map(json.dumps) | st.sampled_from(
    ['"\\u003a"', '"\\u003A"', '"\\\\u003a"', '"\\ud83d\\ude00"', '"\\ud83d"', '"a"', '"\\u0061"']
)
SPACE = st.sampled_from(["", "", " ", "\n\t"])
LITERALS_NESTED = st.recursive(
    NUMBERS | STRINGS | st.sampled_from(["null", "true", "false"]),
    lambda inner: (
        st.builds(lambda space, members: f"[{space}{(space + ',').join(members)}]", SPACE, st.lists(inner, max_size=4))
        | st.builds(
            lambda space, members: "{" + ",".join(f"{key}{space}:{space}{value}" for key, value in members) + "}",
            SPACE,
            st.lists(st.tuples(STRINGS, inner), max_size=4),
        )
    ),
    max_leaves=12,
)


@unhurried
@given(st.binary(max_size=40) | st.text('[]{}",:\\ue+d8Dc0159.-aN\u00e9 ', max_size=40).map(str.encode))
def test_any_bytes_are_read_as_exactly(text: bytes) -> None:
    assert_read_as_exactly(text)


@unhurried
@given(st.lists(st.integers(0, 2**64 - 1).map(lambda bits: np.uint64(bits).view(np.float64).item())))
def test_any_double_is_read_to_the_last_bit(values: list[float]) -> None:
    for form in (repr, "{:.20e}".format, "{:.16e}".format, "{:.17g}".format):
        assert_read_as_exactly(f"[{','.join(form(x) for x in values if math.isfinite(x))}]".encode())


def test_without_wide_integers_all_else_is_the_same() -> None:
    assert loads(b'{"a":[18446744073709551615,-9223372036854775808]}', wide_integers=False) == {
        "a": [2**64 - 1, -(2**63)]
    }
    assert loads(b"[18446744073709551617]", wide_integers=False) == [float(2**64)]
    for text in (b'{"a":1,"a":1}', b"[" * 65 + b"]" * 65):
        with pytest.raises(InvalidJSON):
            loads(text, wide_integers=False)


def test_the_fast_engine_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.strict_json.exact_loads", None)
    monkeypatch.setattr("workers.strict_json.exact_dumps", None)
    for text in (
        b'{"features":[0.1,-2.5e-7,3,4]}',
        b"[0.1234567890123456789,1]",
        b'{"a":{"b":"x:y"},"c":[{"b":1}]}',
        b"[" + b",".join([b"[]"] * 500) + b"]",
    ):
        assert loads(text) == json.loads(text)
        assert json.loads(dumps(loads(text))) == json.loads(text)
    assert dumps({"a": None, "b": [None, 0.1, "null"]}) == b'{"a":null,"b":[null,0.1,"null"]}'


class Plain(enum.Enum):
    A = 1


class Equal(enum.Enum):
    A = 1

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Whole(enum.IntEnum):
    A = 1


class Word(enum.StrEnum):
    A = "a"


class Text(str):
    pass


@dataclass
class Record:
    a: int = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, 2**64, -(2**63) - 1, 10**400, "\ud800", 1e-7, 1e22),
        *(Plain.A, Equal.A, Whole.A, Word.A, Text("a"), Record(), Pair(1, 2), (1, 2), OrderedDict(a=1)),
        *(uuid.UUID(int=1), date(2026, 1, 1), orjson.Fragment(b"[1]"), b"x", {1}, object(), 1j),
        *(np.float32(1), np.float64(1.5), np.int64(1), np.zeros(2), np.bool_(True)),
        *({1: 2}, {None: 1}, {True: 1}, {1.5: 1}, {(1,): 1}, {Word.A: 1}, {Whole.A: 1}, {Plain.A: 1}, {Text("a"): 1}),
    ],
    ids=lambda x: re.sub(" at 0x.*", "", repr(x))[:40],  # the same in every process
)
def test_what_is_more_or_less_than_json_is_written_or_refused_as_exactly(value: object) -> None:
    for wrapped in (value, [value], {"a": [None, value]}, ["null", {"b": value}]):
        ours, exact = outcome(dumps, wrapped), outcome(exact_dumps, wrapped)
        assert ours == exact or (type(value) is float and loads(dumps(wrapped)) == wrapped)


@unhurried
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([*Plain, *Whole, "null"]),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
        max_leaves=8,
    )
)
def test_any_value_is_written_or_refused_as_exactly(value: object) -> None:
    ours, exact = outcome(dumps, value), outcome(exact_dumps, value)
    if ours != exact:  # the text of a float may differ, not the float
        assert outcome(loads, dumps(value)) == outcome(exact_loads, exact_dumps(value))


def test_a_cycle_of_many_branches_ends_at_once() -> None:
    cycle: list[object] = []
    cycle.extend([cycle] * 8)
    with pytest.raises(ValueError):
        dumps(cycle)


def test_deep_values_are_written() -> None:
    value: object = 1
    for _ in range(300):
        value = [value]
    assert dumps(value) == b"[" * 300 + b"1" + b"]" * 300

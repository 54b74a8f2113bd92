from __future__ import annotations

import json
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from workers.codecs import BY_WIRE_ID, CODECS, JSON_ROW
from workers.errors import InvalidInput, InvalidOutput
from workers.model import DTYPES, Array, TensorSpec
from workers.strict_json import loads

# The machine may be busy with other things: time is no property of an example.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

FEATURES = (TensorSpec("features", "float32", (4,)),)
SCORES = (TensorSpec("scores", "float32", (2,)),)


def decode(body: str | bytes, *inputs: TensorSpec) -> dict[str, Array]:
    return JSON_ROW.decode(body if isinstance(body, bytes) else body.encode(), inputs)


def refusal(body: str | bytes, *inputs: TensorSpec) -> str:
    with pytest.raises(InvalidInput) as caught:
        decode(body, *inputs)
    return str(caught.value)


def encode(array: Array) -> str:
    """The text of the one member of an answer, without its name."""
    body = JSON_ROW.encode({"y": array}, (TensorSpec("y", array.dtype.name, array.shape[1:]),)).decode()
    assert body.startswith('{"y":') and body.endswith("}")
    return body[5:-1]


def test_codecs_are_found_by_name_and_by_wire_id() -> None:
    assert {(name, codec.name) for name, codec in CODECS.items()} == {(name, name) for name in CODECS}
    assert list(BY_WIRE_ID.values()) == list(CODECS.values())


# The `/score` contract


def test_a_row_of_four_numbers_is_one_row_of_float32() -> None:
    array = decode('{"features":[1,2.5,-3e0,4]}', *FEATURES)["features"]
    assert array.shape == (1, 4) and array.dtype == np.float32
    assert array.tolist() == [[1.0, 2.5, -3.0, 4.0]]
    assert not array.flags.writeable
    assert JSON_ROW.decode(memoryview(b'{"features":[1,2,3,4]}'), FEATURES)["features"].sum() == 10


def test_members_no_spec_names_are_ignored() -> None:
    assert list(decode('{"a":null,"features":[1,2,3,4],"b":[{}]}', *FEATURES)) == ["features"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"features":[1,2,3,NaN]}',
        b'{"features":[1,2,3,1e999]}',
        b'{"features":[1,2,3,4],"features":[1,2,3,4]}',
        b'{"features":[1,2,3,4],"x":"\\ud800"}',
        '{"features":[1,2,3,4]}'.encode("utf-16"),
        b'{"features":[1,2,3,4],"x":"\xff"}',
        b"[" * 100_000,
        b'{"features":[1,2,3,' + b"9" * 5000 + b"]}",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_what_is_not_strict_json_is_invalid_json(body: bytes) -> None:
    assert refusal(body, *FEATURES) == "invalid json"


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        "null",
        "3",
        '"features"',
        "[]",
        "[1,2,3,4]",
        '{"Features":[1,2,3,4]}',
        '{"features":null}',
        '{"features":4}',
        '{"features":"1234"}',
        '{"features":{"0":1,"1":2,"2":3,"3":4}}',
        '{"features":[]}',
        '{"features":[1,2,3]}',
        '{"features":[1,2,3,4,5]}',
        '{"features":[[1,2,3,4]]}',
        '{"features":[1,2,3,[4]]}',
        '{"features":[1,2,3,"4"]}',
        '{"features":[1,2,3,true]}',
        '{"features":[1,2,3,null]}',
        '{"features":[1,2,3,{}]}',
        '{"features":[1,2,3,1e39]}',
        '{"features":[1,2,3,-1e308]}',
        '{"features":[1,2,3,3.4028236e38]}',
        '{"features":[1,2,3,1' + "0" * 39 + "]}",
        '{"features":[1,2,3,1' + "0" * 400 + "]}",
    ],
)
def test_all_but_four_finite_float32_numbers_are_refused(body: str) -> None:
    assert refusal(body, *FEATURES) == "'features' must hold 4 numbers"


def test_the_largest_float32_is_a_number_and_the_smallest_rounds_to_zero() -> None:
    array = decode('{"features":[3.4028235e38,-3.4028235e38,1e-50,340282346638528859811704183484516925440]}', *FEATURES)
    top = np.finfo(np.float32).max
    assert array["features"].tolist() == [[top, -top, 0.0, top]]


def test_scores_are_written_as_short_as_they_were_meant() -> None:
    assert JSON_ROW.encode({"scores": np.array([[5.25, 5.25]], "f4")}, SCORES) == b'{"scores":[5.25,5.25]}'
    assert JSON_ROW.encode({"scores": np.array([[0.755, -0.1]], "f4")}, SCORES) == b'{"scores":[0.755,-0.1]}'


# Any spec


@pytest.mark.parametrize(
    ("spec", "body", "expected"),
    [
        (TensorSpec("x", "float32", (-1,)), "[]", []),
        (TensorSpec("x", "float32", (-1,)), "[1.5,2]", [1.5, 2.0]),
        (TensorSpec("x", "float64", ()), "0.1", 0.1),
        (TensorSpec("x", "float16", (1,)), "[-0.5]", [-0.5]),
        (TensorSpec("x", "int64", ()), "-9223372036854775808", -(2**63)),
        (TensorSpec("x", "uint64", ()), "18446744073709551615", 2**64 - 1),
        (TensorSpec("x", "uint8", (2, 3)), "[[0,1,2],[3,4,255]]", [[0, 1, 2], [3, 4, 255]]),
        (TensorSpec("x", "int8", (-1, 2)), "[[1,2],[3,4],[5,6]]", [[1, 2], [3, 4], [5, 6]]),
        (TensorSpec("x", "int8", (-1, 2)), "[]", []),
        (TensorSpec("x", "int8", (2, -1)), "[[],[]]", [[], []]),
        (TensorSpec("x", "bool", (2,)), "[true,false]", [True, False]),
        (TensorSpec("x", "float32", (1, 1, 1)), "[[[7]]]", [[[7.0]]]),
    ],
)
def test_every_shape_and_dtype_is_read(spec: TensorSpec, body: str, expected: object) -> None:
    array = decode(f'{{"x":{body}}}', spec)["x"]
    assert array.dtype == spec.dtype
    assert array.ndim == 1 + len(spec.shape)
    assert array.tolist() == [expected]
    assert loads(encode(array).encode()) == expected


def test_an_empty_list_leaves_its_inner_lengths_as_declared() -> None:
    assert decode('{"x":[]}', TensorSpec("x", "int8", (-1, 2, -1)))["x"].shape == (1, 0, 2, 0)


@pytest.mark.parametrize(
    ("spec", "bodies", "reason"),
    [
        (TensorSpec("x", "float32", (-1,)), ["1", "[[]]", "[true]", '["1"]'], "'x' must hold numbers"),
        (TensorSpec("x", "float32", ()), ["[1]", "true", "null", "1e39"], "'x' must be a number"),
        (TensorSpec("x", "float16", ()), ["65520", "1e5"], "'x' must be a number"),
        (TensorSpec("x", "float64", ()), ["1" + "0" * 309], "'x' must be a number"),
        (TensorSpec("x", "float32", (1,)), ["[]", "[1,2]"], "'x' must hold 1 number"),
        (
            TensorSpec("x", "float32", (2, 3)),
            ["[1]", "[[1,2,3],[1,2]]", "[[1,2,3]]", "[[1,2,3],4]"],
            "'x' must hold 2 x 3 numbers",
        ),
        (TensorSpec("x", "float32", (-1, 3)), ["[[1,2,3],[1,2]]", "[1,2,3]"], "'x' must hold n x 3 numbers"),
        (TensorSpec("x", "float32", (2, -1)), ["[[1,2,3],[1,2]]"], "'x' must hold 2 x n numbers"),
        (
            TensorSpec("x", "uint8", (2,)),
            ["[1,256]", "[1,-1]", "[1,2.0]", "[1,true]", "[1]"],
            "'x' must hold 2 integers",
        ),
        (TensorSpec("x", "int64", ()), ["9223372036854775808", "1.5", "1e3", '"1"'], "'x' must be an integer"),
        (TensorSpec("x", "bool", (2,)), ["[0,1]", "[true,null]"], "'x' must hold 2 booleans"),
        (TensorSpec("x", "bool", ()), ["0", '"true"'], "'x' must be a boolean"),
    ],
)
def test_a_misfit_is_refused_with_what_was_wanted(spec: TensorSpec, bodies: list[str], reason: str) -> None:
    for body in bodies:
        assert refusal(f'{{"x":{body}}}', spec) == reason
    assert refusal("{}", spec) == reason


def test_each_tensor_is_read_from_its_own_member_and_written_in_the_order_of_the_specs() -> None:
    a, b = TensorSpec("a", "int8", ()), TensorSpec('b"', "bool", (1,))
    arrays = decode('{"b\\"":[true],"a":7}', a, b)
    assert JSON_ROW.encode(arrays, (a, b)) == b'{"a":7,"b\\"":[true]}'
    assert refusal('{"a":7}', a, b) == "'b\"' must hold 1 boolean"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_by_name(dtype: str, value: float) -> None:
    for shape in [(1,), (1, 3), (1, 2, 2)]:
        array = np.zeros(shape, dtype)
        array.flat[-1] = value
        with pytest.raises(InvalidOutput, match="'y' holds NaN or Infinity"):
            encode(array)


# Numbers as text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.755, "0.755"),
        (1, "1.0"),
        (-0.0, "-0.0"),
        (1e-10, "1e-10"),
        (1e20, "1e+20"),
        (1e-45, "1e-45"),
        (3.4028235e38, "3.4028235e+38"),
        (16777216, "16777216.0"),
    ],
)
def test_float32_is_written_shortest(value: float, text: str) -> None:
    assert encode(np.array([value], "f4")) == text
    assert encode(np.array([[value] * 100], "f4")) == f"[{','.join([text] * 100)}]"


def test_float32_reads_back_the_same_by_way_of_a_double() -> None:
    value = float.fromhex("0x1.5c87fap-84")  # its shortest text, 7.038531e-26, becomes another by way of a double
    assert np.float32(float(str(np.float32(value)))) != np.float32(value)
    assert encode(np.array([[1.5, value, 0.1]], "f4")) == "[1.5,7.03853069e-26,0.1]"


def test_every_power_of_two_reads_back_the_same() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype("f4")
    around = np.concatenate(
        [np.nextafter(powers, np.float32(0)), powers, -powers, np.nextafter(powers, np.float32(2e38))]
    )
    assert (np.array(loads(encode(around[None]).encode())).astype("f4") == around).all()


@unhurried
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_any_float32_reads_back_the_same(bits: list[int]) -> None:
    array = np.array(bits, "u4").view("f4")
    array = array[np.isfinite(array)][None]
    text = encode(array)
    assert np.array(loads(text.encode()), "f8").astype("f4").tobytes() == array.tobytes()
    assert decode(f'{{"y":{text}}}', TensorSpec("y", "float32", (-1,)))["y"].tobytes() == array.tobytes()
    for short, value in zip(text[1:-1].split(","), array[0], strict=False):
        digits = next(d for d in range(1, 10) if np.float32(float(f"{value:.{d}e}")) == value)
        assert float(short) == float(f"{value:.{digits}e}") or len(short) <= len(f"{value:.{digits}e}")


def as_numpy_and_python_write(array: Array) -> str:
    """The text of a row by the slow way: numpy's own shortest form, nine digits where a double spoils it."""

    def number(x: np.floating) -> float:
        short = float(str(x))
        return short if type(x)(short) == x else float(f"{float(x):.9g}")

    def nested(row: Array) -> object:
        return [nested(part) for part in row] if row.ndim else number(row[()])

    return json.dumps(nested(array[0]), separators=(",", ":"))


@pytest.mark.parametrize(
    "values",
    [
        [
            0.0001,
            0.00009999999,
            0.00001,
            0.000012,
            0.00001234567,
            0.000001,
            0.0000012,
            1e-7,
            1.5e-7,
            1e-9,
            1e-10,
            1e-12,
        ],
        [10.00001, 0.00001, 100.00001, 1.0000001, 20.0000305, 0.0, -0.0, -0.00001, -1e-7],
        [9999999, 1e13, 1.5e13],
        [1e14, 0.1],
        [1e15, 1e-7],
        [1e16, 0.00001],
        [123456789012.0, 1e17],
        [float.fromhex("0x1.5c87fap-84"), 0.1],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_near_a_change_of_form_are_written_as_python_writes_them(values: list[float], dtype: str) -> None:
    with np.errstate(over="ignore"):
        array = np.array([values], dtype)
    array = array[np.isfinite(array)][None]
    assert encode(array) == as_numpy_and_python_write(array)
    assert encode(array[..., None]) == as_numpy_and_python_write(array[..., None])
    for value in array[0]:
        assert encode(np.array([value])) == as_numpy_and_python_write(np.array([value]))


@unhurried
@given(
    st.sampled_from(["float16", "float32", "float64"]),
    st.lists(st.integers(0, 2**64 - 1), max_size=20),
    st.lists(st.floats(1e-13, 1e-2) | st.floats(1e11, 1e18) | st.floats(-2, 2), max_size=20),
)
def test_any_float_is_written_as_python_writes_it(dtype: str, bits: list[int], values: list[float]) -> None:
    with np.errstate(over="ignore"):
        array = np.concatenate([np.array(bits, "u8").view(dtype), np.array(values).astype(dtype)])
    array = array[np.isfinite(array)]
    rows = array[None]
    assert encode(rows) == as_numpy_and_python_write(rows)
    table = array[: len(array) // 2 * 2].reshape(1, -1, 2)
    assert encode(table) == as_numpy_and_python_write(table)


def test_a_float32_that_a_double_spoils_is_found_in_every_shape() -> None:
    value = np.float32(float.fromhex("0x1.5c87fap-84"))
    assert encode(np.array([value])) == "7.03853069e-26"
    assert encode(np.array([[[0.1, 2], [value, 3]]], "f4")) == "[[0.1,2.0],[7.03853069e-26,3.0]]"


def test_common_rows_take_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.codecs._exact_text", None)
    normal = np.random.default_rng(0).standard_normal((1, 10_000)).astype("f4")
    softmax = np.exp(normal * 4) / np.exp(normal * 4).sum()
    for array in (normal, softmax, softmax.astype("f8"), normal.reshape(1, 100, 100), np.arange(6).reshape(1, 2, 3)):
        assert np.array(loads(encode(array).encode())).astype(array.dtype).tobytes() == array.tobytes()


def test_every_float16_reads_back_the_same() -> None:
    array = np.arange(2**16, dtype="u2").view("f2")
    array = array[np.isfinite(array)][None]
    assert np.array(loads(encode(array).encode()), "f2").tobytes() == array.tobytes()


ARRAYS = hnp.arrays(
    st.sampled_from(DTYPES),
    st.builds(lambda shape: (1, *shape), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)),
)


@unhurried
@given(ARRAYS)
def test_any_array_reads_back_the_same_or_is_refused(array: Array) -> None:
    spec = TensorSpec("y", array.dtype.name, array.shape[1:])
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        with pytest.raises(InvalidOutput):
            encode(array)
        return
    body = JSON_ROW.encode({"y": array}, (spec,))
    back = JSON_ROW.decode(body, (spec,))["y"]
    assert (back.shape, back.dtype, back.tobytes()) == (array.shape, array.dtype, array.tobytes())


def test_layout_in_memory_does_not_matter() -> None:
    array = np.arange(12, dtype="f4").reshape(3, 4).T[None]
    assert loads(encode(array).encode()) == array[0].tolist()
    assert loads(encode(array[:, ::-1]).encode()) == array[0, ::-1].tolist()
    assert encode(np.array([[0.755, 1e38]], ">f4")) == "[0.755,1e+38]"
    assert encode(np.array([[0.755, 0.5]], ">f8")) == "[0.755,0.5]"
    assert encode(np.array([[1, -2]], ">i4")) == "[1,-2]"


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_a_megabyte_takes_a_fraction_of_a_second(dtype: str) -> None:
    array = (np.random.default_rng(0).random((1, 10_000, 10)) * 1000).astype(dtype)
    began = time.perf_counter()
    body = JSON_ROW.encode({"y": array}, (TensorSpec("y", dtype, (-1, 10)),))
    back = JSON_ROW.decode(body, (TensorSpec("y", dtype, (-1, 10)),))["y"]
    assert time.perf_counter() - began < 2
    assert back.tobytes() == array.tobytes()


@unhurried
@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(str.encode)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists).map(
        lambda x: json.dumps({"features": x}).encode()
    )
)
def test_any_body_is_four_numbers_or_one_of_two_refusals(body: bytes) -> None:
    try:
        array = decode(body, *FEATURES)["features"]
    except InvalidInput as error:
        assert str(error) in ("invalid json", "'features' must hold 4 numbers")
    else:
        assert array.shape == (1, 4) and np.isfinite(array).all()
        assert struct.pack("<4f", *json.loads(body)["features"]) == array.tobytes()


SLOTS = {"float32": "f", "float64": "d", "int8": "b", "uint64": "Q", "bool": "?"}
MEMBERS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just("1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("u"), inner),
)
ROWS = MEMBERS | st.lists(st.integers(-3, 300) | st.floats(-1, 1), min_size=2, max_size=2)
TABLES = ROWS | st.lists(ROWS, min_size=2, max_size=2)


@unhurried
@given(
    dtype=st.sampled_from(sorted(SLOTS)),
    shape=st.sampled_from([(), (2,), (-1,), (2, 2), (-1, 2)]),
    value=TABLES | st.lists(st.booleans(), max_size=2),
    ignored=MEMBERS | st.sampled_from([2**64, 10**400, "u" * 10, ["[", True]]),
    padding=st.sampled_from([0, 300]),
    name=st.sampled_from(["x", "ul["]),
)
def test_a_member_is_read_as_its_dtype_and_shape_say_or_refused(
    dtype: str, shape: tuple[int, ...], value: object, ignored: object, padding: int, name: str
) -> None:
    types = {"f": (int, float), "d": (int, float), "?": (bool,)}.get(SLOTS[dtype], (int,))

    def leaves(value: object, shape: tuple[int, ...]) -> list[object]:
        if not shape:
            if type(value) not in types:
                raise TypeError
            return [value]
        if type(value) is not list or shape[0] not in (-1, len(value)):
            raise TypeError
        return [leaf for inner in value for leaf in leaves(inner, shape[1:])]

    text = json.dumps({name: value, "z": ignored})
    body = text[:-1] + " " * padding + "}"  # long bodies are looked through in another way
    spec = TensorSpec(name, dtype, shape)
    try:
        members = leaves(json.loads(text)[name], shape)
        expected = struct.pack(f"={len(members)}{SLOTS[dtype]}", *members)
    except (TypeError, OverflowError, struct.error):
        assert refusal(body, spec).startswith(repr(name))
    else:
        array = decode(body, spec)[name]
        assert (array.dtype, array.tobytes()) == (dtype, expected)


@pytest.mark.parametrize("padding", ["", " " * 300])
@pytest.mark.parametrize("literal", ["true", "false", "null"])
def test_a_literal_is_no_number_wherever_it_stands(padding: str, literal: str) -> None:
    for dtype in set(DTYPES) - {"bool"}:
        row, table = TensorSpec("x", dtype, (2,)), TensorSpec("y", dtype, (-1, 1))
        for body in (
            f'{{"x":[0,{literal}],{padding}"y":[[0],[1]]}}',
            f'{{"y":[[0],[1]],"x":{padding}[{literal},0]}}',
        ):
            assert refusal(body, row, table).startswith("'x' must hold 2")
        assert refusal(f'{{"x":[0,1],{padding}"y":[[0],[{literal}]]}}', row, table).startswith("'y' must hold n x 1")
        assert refusal(f'{{"x":{literal},"z":[{padding}]}}', TensorSpec("x", dtype, ())).startswith("'x' must be a")
    assert refusal(f'{{"x":[0,1]{padding}}}', TensorSpec("x", "bool", (2,))) == "'x' must hold 2 booleans"
    assert refusal(f'{{"x":[[0]]{padding}}}', TensorSpec("x", "bool", (1, 1))) == "'x' must hold 1 x 1 booleans"


def test_an_integer_beyond_64_bits_is_a_number_to_floats_only() -> None:
    for dtype in ("float32", "float64"):
        for text in ("18446744073709551616", "-9223372036854775809", "36893488147419107329", "9" * 38):
            array = decode(f'{{"x":[{text}]}}', TensorSpec("x", dtype, (1,)))["x"]
            assert array.tobytes() == struct.pack(f"={SLOTS[dtype]}", int(text))
    for dtype in ("int64", "uint64"):
        refusal('{"x":[18446744073709551616]}', TensorSpec("x", dtype, (1,)))
        refusal('{"x":[-9223372036854775809]}', TensorSpec("x", dtype, (1,)))

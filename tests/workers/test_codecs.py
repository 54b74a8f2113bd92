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

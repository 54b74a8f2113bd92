"""Arrays in a block of memory, and what is held against a model's declaration."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import InvalidInput, ModelFailed
from workers.model import DTYPES, Array, TensorSpec
from workers.tensors import (
    ALIGN,
    InputChecks,
    Layouts,
    OutputChecks,
    check_outputs,
    layout_of,
    signature,
    tensor_fault,
    undescribe,
)

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Of any dtype, byte order, shape and way to lie in memory."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES))).newbyteorder(draw(st.sampled_from("<>")))
    shape = draw(SHAPES)
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    count = int(np.prod(shape))
    array = random.integers(0, 2 if dtype.kind == "b" else 256, count * dtype.itemsize, np.uint8)
    array = (array[: count * dtype.itemsize].view(dtype) if count else np.empty(0, dtype)).reshape(shape)
    way = draw(st.sampled_from(["C", "F", "reversed", "every other"]))
    if way == "F":
        return np.asfortranarray(array)
    if way == "reversed":
        return array[::-1]
    if way == "every other":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    return array


@given(st.dictionaries(st.text(min_size=1, max_size=8), arrays(), min_size=1, max_size=4))
def test_arrays_come_back_as_they_were(given: dict[str, Array]) -> None:
    layout = Layouts().of(signature(given))
    memory = bytearray(layout.size + ALIGN)
    memory[: len(layout.descriptor)] = layout.descriptor
    for name, view in layout.views(memory, 0).items():
        view[...] = given[name]
    there = Layouts().parse(bytes(memory[: len(layout.descriptor)]))
    assert there == layout and there.group == layout.group
    assert all(tensor.offset % ALIGN == 0 for tensor in there.tensors)
    found = there.views(memory, 0)
    assert list(found) == list(given)
    for name, array in given.items():
        view = found[name]
        assert view.dtype.name == array.dtype.name and view.shape == array.shape and view.flags.c_contiguous
        assert view.tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()
    ends = [tensor.offset + found[tensor.name].nbytes for tensor in there.tensors]
    starts = [*(tensor.offset for tensor in there.tensors[1:]), layout.size]
    assert all(end <= start for end, start in zip(ends, starts, strict=True)), "none overlaps the next"


def test_a_layout_is_worked_out_once_and_forgotten_in_time() -> None:
    layouts = Layouts()
    first = layouts.of(signature({"x": np.zeros((1, 2))}))
    assert layouts.of(signature({"x": np.ones((1, 2))})) is first
    for n in range(5000):
        layouts.of(signature({"x": np.broadcast_to(np.float32(0), (1, n))}))
    again = layouts.of(signature({"x": np.zeros((1, 2))}))
    assert again is not first and again == first


def test_layouts_join_along_the_batch_axis_only() -> None:
    def group(*shape: int, dtype: str = "<f4", name: str = "x") -> object:
        return layout_of(((name, np.dtype(dtype), shape),)).group

    assert group(1, 3) == group(7, 3) == group(7, 3, dtype=">f4")
    assert len({group(1, 3), group(1, 4), group(1, 3, 1), group(1, 3, dtype="<f8"), group(1, 3, name="y")}) == 5


def test_dimensions_beyond_any_memory_are_only_numbers() -> None:
    layout = layout_of((("x", np.dtype("float64"), (1, 1 << 40, 1 << 20)),))
    assert layout.size > 1 << 63
    assert undescribe(layout.descriptor)[0][2] == (1, 1 << 40, 1 << 20)
    assert json.loads(layout.descriptor) == [["x", "float64", [1, 1 << 40, 1 << 20]]]


# Inputs.

TWO = (TensorSpec("a", "float32", (2,)), TensorSpec("b", "int64", (-1, 3)))


def given_two(**changed: object) -> dict[str, Any]:
    inputs: dict[str, Any] = {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 5, 3), np.int64)}
    return {name: array for name, array in (inputs | changed).items() if array is not None}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"c": np.ones(1)}, "there is no input 'c'; the inputs are 'a', 'b'"),
        ({"b": None}, "input 'b' is missing"),
        ({"a": np.ones((2, 2))}, "input 'a' is float64, declared float32"),
        ({"a": np.ones((2, 2), object)}, "input 'a' is object, declared float32"),
        ({"a": np.ones((2, 2), "c8")}, "input 'a' is complex64, declared float32"),
        ({"a": np.ones((2, 3), np.float32)}, "input 'a' has shape [2, 3], declared [-1, 2]"),
        ({"a": np.ones(2, np.float32)}, "input 'a' has shape [2], declared [-1, 2]"),
        ({"a": np.float32(1) * np.ones(())}, "input 'a' is float64, declared float32"),
        ({"a": np.array(1, np.float32)}, "input 'a' has shape [], declared [-1, 2]"),
        ({"b": np.ones((2, 5, 4), np.int64)}, "input 'b' has shape [2, 5, 4], declared [-1, -1, 3]"),
        ({"b": np.ones((3, 5, 3), np.int64)}, "input 'b' has 3 rows, 'a' has 2"),
        (
            {"a": np.ones((0, 2), np.float32), "b": np.ones((0, 5, 3), np.int64)},
            "0 rows, and between 1 and 4 can be taken at once",
        ),
        (
            {"a": np.ones((5, 2), np.float32), "b": np.ones((5, 5, 3), np.int64)},
            "5 rows, and between 1 and 4 can be taken at once",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_told_why(changed: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        InputChecks(TWO, 4).layout(given_two(**changed))
    assert str(raised.value) == text


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_inputs_that_fit_pass_with_any_open_length_and_byte_order(length: int) -> None:
    checks = InputChecks(TWO, 4)
    inputs = given_two(a=np.ones((4, 2), ">f4"), b=np.ones((4, length, 3), ">i8"))
    layout = checks.layout(inputs)
    assert layout.rows == 4
    assert checks.layout(inputs) is layout


def test_a_specs_open_lengths_are_one_in_a_warm_up() -> None:
    assert TensorSpec("b", "int64", (-1, 3)).zeros(2).shape == (2, 1, 3)
    for dtype in ("float8", "object", "<f4", "complex64"):
        with pytest.raises(ValueError, match=f"tensor 'x': dtype '{dtype}' is not one of bool, uint8"):
            TensorSpec("x", dtype)
    with pytest.raises(ValueError, match="below -1"):
        TensorSpec("x", "bool", (-2,))


# Outputs.

ONE = (TensorSpec("y", "float32", (-1,)),)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (None, "the model answered a NoneType, not named arrays"),
        ([np.ones(2)], "the model answered a list, not named arrays"),
        ({}, "the model answered without output 'y'"),
        ({"y": [[1.0], [2.0]]}, "output 'y' is a list, not an array"),
        ({"y": np.float32(1)}, "output 'y' is a float32, not an array"),
        ({"y": np.ones((1, 3), np.float32)}, "output 'y' has 1 rows for a batch of 2"),
        ({"y": np.array(1, np.float32)}, "output 'y' has no rows for a batch of 2"),
        ({"y": np.ones((2, 3))}, "output 'y' is float64, declared float32"),
        ({"y": np.array([["a"], ["b"]])}, "output 'y' is str32, declared float32"),
        ({"y": np.ones((2, 3, 1), np.float32)}, "output 'y' has shape [2, 3, 1], declared [-1, -1]"),
        ({"y": np.ones((2, 3), np.float32), "z": np.ones(2)}, "the model answered an undeclared output 'z'"),
    ],
)
def test_outputs_that_are_not_as_declared_are_told_why(outputs: Any, text: str) -> None:
    with pytest.raises(ModelFailed) as raised:
        check_outputs(ONE, outputs, 2)
    assert str(raised.value) == text
    checks = OutputChecks(ONE)
    good = {"y": np.ones((2, 3), np.float32)}
    assert checks.check(good, 2) is good
    for _ in range(2):
        with pytest.raises(ModelFailed) as raised:
            checks.check(outputs, 2)
        assert str(raised.value) == text
    with pytest.raises(ModelFailed, match="has 2 rows for a batch of 3"):
        checks.check(good, 3)


def test_more_dimensions_than_an_array_can_have_do_not_fit() -> None:
    spec = TensorSpec("x", "bool", (1,) * 40)
    assert "has shape" in tensor_fault(spec, np.dtype("bool"), (1,) * 41)

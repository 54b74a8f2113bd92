"""Shared memory: how it is cut, reserved, seen and let go of."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.workers.pools import ROOT
from workers.arena import CLOSED, HEADER_SIZE, STEP, Arena, NotEnoughMemory, available_bytes, reserve
from workers.tensors import Layouts, signature

SLOTS = [(4096, 8), (8192, 3), (65536, 1)]


def test_slots_lie_side_by_side_and_others_see_them_the_same() -> None:
    ours = Arena.create(SLOTS)
    theirs = Arena(os.dup(ours.fd))
    assert (
        theirs.bases == ours.bases and theirs.sizes == ours.sizes and theirs.cls == ours.cls == [0] * 8 + [1] * 3 + [2]
    )
    ends = [base + size for base, size in zip(ours.bases, ours.sizes, strict=True)]
    assert ours.bases == [HEADER_SIZE, *ends[:-1]] and ends[-1] == len(ours.map)
    ours.words[CLOSED] = 1
    ours.view[ours.bases[9]] = 7
    assert theirs.words[CLOSED] == 1 and theirs.view[theirs.bases[9]] == 7
    for arena in (ours, theirs):
        arena.close()
        arena.close()


def test_memory_that_is_no_arena_is_refused() -> None:
    fd = reserve("headrace-test", HEADER_SIZE)
    with pytest.raises(ValueError, match="not an arena of this version"):
        Arena(fd)
    os.close(fd)


def test_views_over_a_class_are_the_slots_own_memory() -> None:
    arena = Arena.create(SLOTS)
    arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "e": np.zeros((2, 0)), "b": np.array([True, False])}
    layout = Layouts().of(signature(arrays))
    for slot in (8, 10):
        for tensor, rows in zip(layout.tensors, arena.class_views(1, 64, layout), strict=True):
            rows[slot - 8] = arrays[tensor.name]
        for name, array in layout.views(arena.map, arena.bases[slot] + 64).items():
            assert (array == arrays[name]).all() and array.shape == arrays[name].shape
    assert not any(arena.view[arena.bases[9] : arena.bases[9] + 8192]), "the slot between is untouched"
    del array, rows
    arena.close()


def test_an_array_outlives_the_closing() -> None:
    arena = Arena.create(SLOTS)
    layout = Layouts().of(signature({"a": np.zeros((1, 4))}))
    (rows,) = arena.class_views(0, 64, layout)
    one = rows[3]
    one[...] = 5
    del rows
    arena.close()
    assert one.sum() == 20
    with pytest.raises(ValueError, match="released memoryview"):
        arena.words[0]


def test_what_is_reserved_is_there() -> None:
    fd = reserve("headrace-test", 3 * STEP + 5)
    status = os.fstat(fd)
    assert (status.st_size, status.st_blocks * 512 >= 3 * STEP) == (3 * STEP + 5, True)
    os.close(fd)


def test_reserving_more_than_there_is_names_both_figures_and_keeps_nothing() -> None:
    with pytest.raises(NotEnoughMemory) as raised:
        reserve("headrace-test", 1 << 60)
    found = re.fullmatch(r"shared memory of (\d+) bytes is needed and (\d+) bytes are available", str(raised.value))
    assert found and int(found[1]) == 1 << 60 and 0 < int(found[2]) < available_bytes() * 2


def test_a_pause_may_give_a_reservation_up() -> None:
    pauses = 0

    def pause() -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 2:
            raise KeyError

    with pytest.raises(KeyError):
        reserve("headrace-test", 4 * STEP, pause)
    assert pauses == 2


def test_a_child_of_fork_does_not_have_the_memory() -> None:
    code = """
import os, signal
from workers.arena import Arena
arena = Arena.create([(4096, 1)])
child = os.fork()
if child == 0:
    arena.words[0]
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == -11


WRITER = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), 4096)
words = memoryview(memory).cast("Q")
while not words[1]:
    for _ in range(1000):
        words[0] = 0
        words[0] = 0xFFFFFFFFFFFFFFFF
"""


def test_words_are_never_seen_half_written() -> None:
    fd = reserve("headrace-test", 4096)
    with mmap.mmap(fd, 4096) as memory, memoryview(memory) as view, view.cast("Q") as words:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd])
        seen = set()
        while len(seen) < 2:
            seen.add(words[0])
        for _ in range(500_000):
            seen.add(words[0])
        words[1] = 1
        assert writer.wait(20) == 0
        assert seen == {0, (1 << 64) - 1}
    os.close(fd)

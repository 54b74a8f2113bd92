"""A client's connection to a pool that is played by hand, which speaks nonsense and lets things run out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from workers import Draining, ModelStatus, Overloaded, PoolLost, State, TensorSpec, control
from workers.arena import Arena, reserve
from workers.connection import Connection
from workers.core import Task
from workers.model import Array
from workers.records import OUTPUT, RECORD_SIZE, Record, SlotState
from workers.tensors import Layouts, signature

SPECS = (TensorSpec("x", "float32", (-1,)),), (TensorSpec("y", "float32", (-1,)),)
MODEL = ModelStatus("m", State.READY, "", "", 1, 1, 0, 5.0, 8, 8, *SPECS)
BIG = np.ones((1, 5000), np.float32)
"""More than a slot holds."""
SMALL = BIG[:, :3]


class Pool:
    """The pool's part, step by step."""

    def __init__(self, listener: socket.socket) -> None:
        self.sock, _ = listener.accept()
        self.link = control.Link(self.sock)
        self.link.send(control.Welcome(1, ((4096, 8),), 1 << 24, time.monotonic_ns()))

    def introduce(self) -> None:
        heard = self.link.receive()
        assert heard is not None and isinstance(heard[0], control.Register)
        self.arena, self._reply = Arena(heard[1][0]), heard[1][1]
        self._queue, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.link.send(control.Status(MODEL))
        self.link.send(control.Queue("m"), [write])
        self.link.send(control.Settled())

    def take(self) -> Record:
        return Record.unpack(os.read(self._queue, RECORD_SIZE))

    @property
    def queued(self) -> int:
        return control.queue_depth(self._queue)

    @contextlib.contextmanager
    def filled(self, places: int) -> Iterator[None]:
        """No more than so many are left in the queue, which is then as small as a pipe can be."""
        write = control.reopen(self._queue, os.O_WRONLY | os.O_NONBLOCK)
        size = fcntl.fcntl(self._queue, fcntl.F_SETPIPE_SZ, 4096)
        waste = os.write(write, bytes(size - places * RECORD_SIZE))
        os.close(write)
        yield
        os.read(self._queue, waste)

    def close_queue(self) -> None:
        os.dup2(self._reply, self._queue)

    def answer_in_memory(self, record: Record, y: Array) -> None:
        """The outputs of a task, in a memory file of their own."""
        layout = Layouts().of(signature({"y": y}))
        fd = reserve("headrace-spill", layout.size)
        os.pwrite(fd, layout.descriptor, 0)
        os.pwrite(fd, y.tobytes(), layout.tensors[0].offset)
        at = self.arena.bases[record.slot] >> 3
        self.arena.words[at + OUTPUT] = len(layout.descriptor)
        self.arena.words[at] = record.seq << 8 | SlotState.SPILLED
        self.link.send(control.SpilledTo(record.slot, record.seq), [fd])

    def close(self) -> None:
        self.link.close()
        self.arena.close()
        os.close(self._reply)
        os.close(self._queue)


class Ends:
    """A connection and its pool, introduced to each other."""

    def __init__(self, path: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            self.connection = Connection(path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            self.pool = Pool(listener)
        self.connection.hear()
        self.pool.introduce()
        self.connection.hear()
        assert self.connection.core is not None
        self.core = self.connection.core

    def submit(self, x: Array) -> Task:
        task, record = self.connection.prepare("m", {"x": x}, None)
        self.connection.enqueue("m", task, record)
        return task

    def submit_soon(self) -> Task:
        task, record = self.connection.prepare("m", {"x": SMALL}, None)
        self.connection.enqueue_soon("m", task, record)
        return task

    def outputs(self, task: Task) -> Array:
        y = self.core.arrays(task)["y"].copy()
        self.core.release(task)
        return y

    def close(self) -> None:
        self.connection.close()
        self.pool.close()
        # Only with the connection itself does the last of its descriptors go.
        del self.connection


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    it = Ends(str(tmp_path / "pool.sock"))
    yield it
    it.close()


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """That many can still be opened in this process."""
    listed = os.listdir("/proc/self/fd")
    used = {int(name) for name in listed if os.path.exists(f"/proc/self/fd/{name}")}  # not the listing's own
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [fd for fd in range(limits[0]) if fd not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def no_memory_left() -> Iterator[None]:
    """For mappings of this process of half a megabyte and more; memory files are still to be had."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 19), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("nonsense", [b'["Nobody",{}]', b'["Queue",{"model":"m"}]'])
def test_what_was_settled_before_nonsense_is_not_lost(ends: Ends, nonsense: bytes) -> None:
    task = ends.submit(BIG)
    ends.pool.answer_in_memory(ends.pool.take(), BIG)
    ends.pool.sock.send(nonsense)
    assert ends.connection.hear() == [task]
    assert (ends.outputs(task) == BIG).all()
    assert ends.connection.lost
    with pytest.raises(LookupError):
        ends.connection.check()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_inputs_that_no_descriptor_is_left_for_are_overload(ends: Ends, left: int) -> None:
    before = os.listdir("/proc/self/fd")
    with descriptors_left(left), pytest.raises(Overloaded):
        ends.submit(BIG)
    assert os.listdir("/proc/self/fd") == before
    assert (ends.core.leased, ends.core.under_way) == (0, 0)
    task = ends.submit(BIG)
    ends.pool.answer_in_memory(ends.pool.take(), BIG)
    assert ends.connection.hear() == [task]
    assert (ends.outputs(task) == BIG).all()


def test_inputs_that_no_memory_is_left_to_map_are_overload(ends: Ends) -> None:
    before = os.listdir("/proc/self/fd")
    large = np.ones((1, 1 << 20), np.float32)
    with no_memory_left(), pytest.raises(Overloaded):
        ends.submit(large)
    assert os.listdir("/proc/self/fd") == before
    assert (ends.core.leased, ends.core.under_way) == (0, 0)


def test_outputs_that_no_memory_is_left_to_map_fail_their_task_alone(ends: Ends) -> None:
    large, small = ends.submit(BIG[:, :3]), ends.submit(BIG[:, :3])
    ends.pool.answer_in_memory(ends.pool.take(), np.ones((1, 1 << 20), np.float32))
    ends.pool.answer_in_memory(ends.pool.take(), BIG)
    with no_memory_left():
        assert ends.connection.hear() == [large, small]
    ends.connection.check()
    assert isinstance(large.error, Overloaded)
    assert (ends.outputs(small) == BIG).all()
    assert (ends.core.leased, ends.core.under_way) == (0, 0)


def test_tasks_queued_together_arrive_in_order_and_each_once(ends: Ends) -> None:
    tasks = [ends.submit_soon() for _ in range(5)]
    assert ends.connection.enqueue_waiting("m") == []
    assert [ends.pool.take().seq for _ in tasks] == [task.seq for task in tasks]
    assert ends.pool.queued == 0


@pytest.mark.parametrize("places", [0, 1, 3])
def test_of_tasks_queued_together_those_that_find_no_place_are_overload(ends: Ends, places: int) -> None:
    tasks = [ends.submit_soon() for _ in range(5)]
    with ends.pool.filled(places):
        refused = ends.connection.enqueue_waiting("m")
    got = tasks[:places]
    assert refused == tasks[places:]
    assert all(isinstance(task.error, Overloaded) for task in refused)
    assert [ends.pool.take().seq for _ in got] == [task.seq for task in got]
    assert (ends.core.leased, ends.core.under_way) == (places, places)


def test_tasks_that_wait_to_be_queued_when_the_pool_goes_are_told_once(ends: Ends) -> None:
    tasks = [ends.submit_soon() for _ in range(2)]
    ends.pool.close_queue()
    refused = ends.connection.enqueue_waiting("m")
    assert refused == tasks
    assert [type(task.error) for task in refused] == [PoolLost, PoolLost]
    assert (ends.core.leased, ends.core.under_way) == (0, 0)
    task = ends.submit_soon()
    ends.connection.lost = True
    assert ends.core.lose() == [task]
    assert ends.connection.enqueue_waiting("m") == []


def test_tasks_that_wait_to_be_queued_while_the_queue_is_closed_are_draining(ends: Ends) -> None:
    tasks = [ends.submit_soon() for _ in range(2)]
    ends.pool.link.send(control.CloseQueues())
    ends.connection.hear()
    refused = ends.connection.enqueue_waiting("m")
    assert refused == tasks
    assert [type(task.error) for task in refused] == [Draining, Draining]
    with pytest.raises(Draining):
        ends.connection.admit("m")


def test_a_full_queue_is_seen_by_whoever_is_admitted_one_by_one(ends: Ends) -> None:
    for n in range(MODEL.max_queue):
        ends.connection.admit("m")
        if n % 2:
            ends.submit(SMALL)
        else:
            ends.submit_soon()
    with pytest.raises(Overloaded):
        ends.connection.admit("m")
    ends.connection.enqueue_waiting("m")
    ends.pool.take()
    ends.connection.admit("m")

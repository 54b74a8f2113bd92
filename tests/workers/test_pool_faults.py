"""What must not end the pool, or lose it a task: workers and clients that fail in uncommon ways."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.workers.drivers import x
from tests.workers.pools import (
    PoolProcess,
    alive,
    children,
    core,
    pool,
    queued,
    send,
    statuses,
    title,
    until,
    wait_free,
    wait_replicas,
    wait_state,
)
from workers.client import ThreadClient
from workers.control import Register, Spill, encode
from workers.control import send as tell
from workers.errors import Cancelled, ModelFailed, Overloaded
from workers.records import SLOT_HEADER, Record
from workers.status import State


@pytest.fixture
def running(tmp_path: Path) -> Iterator[PoolProcess]:
    models: dict[str, dict[str, object]] = {
        "echo": {"model": "Echo", "max_batch": 32},
        "children": {"model": "Children"},
        "fickle": {
            "model": "tests.models.strange:Fickle",
            "replicas": 2,
            "options": {"path": str(tmp_path / "refuse")},
        },
        "diary": {
            "model": "tests.models.strange:Diary",
            "options": {"path": str(tmp_path / "diary"), "seconds": 0.3},
        },
        "patient": {"model": "Echo", "max_batch": 8, "max_delay_ms": 5000},
        "quick": {"model": "Slow", "timeout_s": 2},
    }
    with pool(models) as process:
        yield process


@pytest.fixture
def client(running: PoolProcess) -> Iterator[ThreadClient]:
    with ThreadClient(running.socket_path) as client:
        client.wait_ready(30)
        yield client


def guardians(running: PoolProcess) -> list[int]:
    return [pid for pid in children(running.pid) if alive(pid) and title(pid) == "headrace guardian"]


def test_what_a_model_has_started_ends_with_the_pool(running: PoolProcess, client: ThreadClient) -> None:
    child = int(client.predict("children", {"x": x(0)})["child"][0])
    (guard,) = guardians(running)
    running.kill()
    until(lambda: not alive(child) and not alive(guard), "the model's own process and the guardian are gone", 2)


def test_a_guardian_that_is_killed_is_replaced(running: PoolProcess, client: ThreadClient) -> None:
    child = int(client.predict("children", {"x": x(0)})["child"][0])
    first = guardians(running)
    send(first[0], signal.SIGKILL)
    until(lambda: guardians(running) not in ([], first), "there is another guardian")
    running.kill()
    until(lambda: not alive(child), "the model's own process is gone", 2)


def test_no_signal_that_kills_a_worker_ends_the_pool(running: PoolProcess, client: ThreadClient) -> None:
    for number in (signal.SIGRTMIN + 5, signal.SIGXCPU):
        worker = running.worker("echo")
        os.kill(worker, number)
        until(lambda worker=worker: not alive(worker), "the worker is dead")
        wait_replicas(client, "echo")
        assert client.predict("echo", {"x": x(1)})["y"] == 1
    assert f"signal {signal.SIGRTMIN + 5}" in running.log()


def test_clients_that_break_the_protocol_cost_the_pool_no_descriptor(
    running: PoolProcess, client: ThreadClient
) -> None:
    client.predict("echo", {"x": x(1)})
    held = running.held()
    read, write = os.pipe()
    memory = os.memfd_create("test")
    os.ftruncate(memory, 8192)
    register, deep = encode(Register(1)), b"[" * 60_000
    for packets in (
        [(register, [memory])],
        [(register, [memory, write])],
        [(register, [])],
        [(b'["QueuesClosed",{}]', [read, write, memory])] * 2 + [(b"nonsense", [read])],
        [(encode(Spill(9)), [memory])] * 2,
        [(deep, [])],
        [(b" " * 200_000, [])],
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            sock.connect(running.socket_path)
            assert b"Welcome" in sock.recv(4096)
            for packet, fds in packets:
                socket.send_fds(sock, [packet], fds)
            assert sock.recv(4096) == b""
    for fd in (read, write, memory):
        os.close(fd)
    until(lambda: running.held() == held, "the pool holds what it held")
    assert client.predict("echo", {"x": x(1)})["y"] == 1


def test_inputs_that_nobody_can_read_fail_alone_and_the_slot_is_good_again(
    running: PoolProcess, client: ThreadClient
) -> None:
    client.predict("echo", {"x": x(1)})
    worker, arena = running.worker("echo"), core(client).arena
    # The slot that is free again is the next to be leased, and still holds the same description of inputs.
    for base in arena.bases:
        arena.view[base + SLOT_HEADER : base + SLOT_HEADER + 4] = b"[[]\xff"
    with pytest.raises(ModelFailed, match="the inputs cannot be read"):
        client.predict("echo", {"x": x(2)}, deadline=time.monotonic() + 5)
    assert client.predict("echo", {"x": x(3)})["y"] == 3
    assert running.worker("echo") == worker


def test_a_record_of_a_slot_that_is_not_there_costs_nobody_anything(running: PoolProcess, client: ThreadClient) -> None:
    connection = client._connection
    assert connection is not None
    eight = {"x": np.ones((8, 3), np.float32)}
    client.predict("patient", eight)
    worker, inside = running.worker("patient"), core(client)
    record = Record(inside.arena_id, 1, 1 << 62, time.monotonic_ns(), 0, 1 << 20, 0, 0, 1).pack()
    os.write(connection._queues["patient"], record)
    assert client.predict("patient", eight)["y"].shape == (8, 3)
    assert running.worker("patient") == worker
    # One that the pool finds with a dead worker.
    os.write(connection._queues["patient"], record)
    until(lambda: queued(client, "patient") == 0, "it has been taken")
    send(worker, signal.SIGKILL)
    until(lambda: not alive(worker), "the worker is dead")
    wait_replicas(client, "patient")
    assert client.predict("patient", eight)["y"].shape == (8, 3)


def test_a_client_registers_once(running: PoolProcess) -> None:
    with ThreadClient(running.socket_path) as client:
        client.wait_ready(30)
        connection = client._connection
        assert connection is not None and connection.core is not None
        fds = [os.dup(connection.core.arena.fd), os.memfd_create("test")]
        tell(connection.link.sock, Register(1), fds)
        for fd in fds:
            os.close(fd)
        until(lambda: client._connection not in (None, connection), "it was dropped, and has come again")
        client.wait_ready(30)


def test_any_number_of_weights_can_be_shared() -> None:
    models: dict[str, dict[str, object]] = {
        "many": {"model": "tests.models.strange:ManyWeights", "replicas": 2, "options": {"count": 3000}}
    }
    with pool(models) as process, ThreadClient(process.socket_path) as client:
        wait_replicas(client, "many")
        assert client.predict("many", {"x": x(0)})["y"] == 3000


def test_a_refusal_at_a_restart_does_not_close_a_model_that_serves(
    running: PoolProcess, client: ThreadClient, tmp_path: Path
) -> None:
    wait_replicas(client, "fickle")
    (tmp_path / "refuse").touch()
    send(running.workers("fickle")[0], signal.SIGKILL)
    until(lambda: "no licence is free" in statuses(client)["fickle"].reason, "its restart is refused")
    assert statuses(client)["fickle"].state is State.READY
    assert client.predict("fickle", {"x": x(1)})["y"] == 1
    (tmp_path / "refuse").unlink()
    wait_replicas(client, "fickle")


def test_a_refusal_at_the_first_start_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    options = {"path": str(tmp_path / "refuse")}
    models: dict[str, dict[str, object]] = {"fickle": {"model": "tests.models.strange:Fickle", "options": options}}
    with pool(models) as process, ThreadClient(process.socket_path) as client:
        wait_state(client, State.REFUSED, "fickle")
        assert statuses(client)["fickle"].code == "LICENSE_FAILED"


def test_what_nobody_waits_for_any_more_is_not_run_however_late_that_is_known(
    client: ThreadClient, tmp_path: Path
) -> None:
    calls = tmp_path / "diary"
    before = calls.read_text().count("\n")
    # Other shapes than one another, so that the worker, which takes them all at once, must run them singly.
    futures = [client.submit("diary", {"x": np.zeros((1, n), np.float32)}) for n in range(1, 12)]
    until(lambda: calls.read_text().count("\n") > before, "the first runs")
    for future in futures:
        future.cancel()
    begun = time.monotonic()
    assert client.predict("diary", {"x": x(1)})["y"] == 1
    # The one that ran, one that may have been taken alone before it, and the good one.
    assert calls.read_text().count("\n") - before <= 3
    assert time.monotonic() - begun < 1.5
    for future in futures:
        with pytest.raises(Cancelled):
            future.result(5)
    wait_free(client)


def test_a_task_that_fills_the_batch_waits_for_no_other(client: ThreadClient) -> None:
    begun = time.monotonic()
    assert client.predict("patient", {"x": np.ones((8, 3), np.float32)})["y"].shape == (8, 3)
    assert time.monotonic() - begun < 2.5


def test_what_stood_still_with_the_pool_gets_its_time_back(running: PoolProcess, client: ThreadClient) -> None:
    worker = running.worker("quick")
    future = client.submit("quick", {"ms": np.float32([1500])}, deadline=time.monotonic() + 20)
    until(lambda: queued(client, "quick") == 0, "it has been taken")
    both = (worker, running.pid)
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    frozen = time.monotonic()
    until(lambda: time.monotonic() - frozen > 2.5, "they have stood still for longer than the model's limit")
    for pid in both:
        os.kill(pid, signal.SIGCONT)
    assert future.result(10)["ms"] == 1500
    assert running.worker("quick") == worker


def test_an_answer_for_which_there_is_no_descriptor_fails_alone() -> None:
    models: dict[str, dict[str, object]] = {"huge": {"model": "Huge"}}
    with pool(models) as process, ThreadClient(process.socket_path) as client:
        client.wait_ready(30)
        assert len(client.predict("huge", {"n": np.array([3_000_000])})["y"][0]) == 3_000_000
        worker = process.worker("huge")
        soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(Overloaded):
            client.predict("huge", {"n": np.array([3_000_000])})
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (soft, hard))
        assert len(client.predict("huge", {"n": np.array([3_000_000])})["y"][0]) == 3_000_000
        assert process.worker("huge") == worker

"""The pool against what can befall processes: workers, pools and clients are stopped and killed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.workers.drivers import client_of, client_with, ms, predicting, wait_depth, x
from tests.workers.pools import (
    ROOT,
    PoolProcess,
    alive,
    arenas,
    pool,
    send,
    spills,
    states,
    title,
    tree,
    until,
    wait_replicas,
)
from workers import DeadlineExceeded, PoolLost, ThreadClient
from workers.records import SlotState

MODELS: dict[str, dict[str, object]] = {
    "echo": {"model": "Echo"},
    "pair": {"model": "Pid", "replicas": 2},
    "slow": {"model": "Slow", "max_batch": 1, "timeout_s": 1.5},
}


Both = tuple[PoolProcess, ThreadClient]


@pytest.fixture
def processes() -> Iterator[Both]:
    with pool(MODELS) as running, client_with(running.socket_path, *MODELS) as client:
        yield running, client
        wait_replicas(client, *MODELS)


def test_a_productive_worker_that_is_killed_is_replaced_at_once(processes: Both) -> None:
    running, client = processes
    for _ in range(4):
        client.predict("echo", {"x": x(1)})
        worker = running.worker("echo")
        send(worker, signal.SIGKILL)
        began = time.monotonic()
        until(lambda: running.workers("echo") not in ([], [worker]), "there is another")  # noqa: B023
        assert client.predict("echo", {"x": x(1)})["y"] == 1
        # Later deaths in a row would wait for seconds, had it been fruitless.
        assert time.monotonic() - began < 2


def test_an_idle_worker_that_is_killed_costs_nobody_anything(processes: Both) -> None:
    running, client = processes
    for _ in range(2):
        send(running.worker("echo"), signal.SIGKILL)
        assert client.predict("echo", {"x": x(3)})["y"] == 3


def test_all_workers_killed_at_once(processes: Both) -> None:
    running, client = processes
    # Four starts at once on a busy machine may take longer than the model's time limit.
    calls = [predicting(client, "slow", time.monotonic() + 20, ms=ms(100)) for _ in range(4)]
    calls += [predicting(client, "pair", x=x(1)) for _ in range(20)]
    for name in MODELS:
        for worker in running.workers(name):
            send(worker, signal.SIGKILL)
    for call in calls:
        call.result()


def test_a_stopped_idle_worker_is_replaced_when_it_is_needed(processes: Both) -> None:
    running, client = processes
    worker = running.worker("echo")
    send(worker, signal.SIGSTOP)
    began = time.monotonic()
    assert client.predict("echo", {"x": x(1)})["y"] == 1
    assert time.monotonic() - began < 4
    assert running.worker("echo") != worker


def test_a_stopped_busy_worker_is_replaced_at_its_time_limit(processes: Both) -> None:
    running, client = processes
    worker = running.worker("slow")
    call = predicting(client, "slow", ms=ms(500))
    until(lambda: states(client) == [SlotState.RUNNING], "it is at work")
    send(worker, signal.SIGSTOP)
    behind = client.submit("slow", {"ms": ms(1)}, deadline=time.monotonic() + 20)
    assert isinstance(call.failure(2.5), DeadlineExceeded)
    until(lambda: not alive(worker), "it is gone", 1)
    assert behind.result()["ms"] == 1


def test_a_stopped_pool_is_in_nobodys_way_and_kills_nobody_after(processes: Both) -> None:
    """Its workers were stopped too, as in a machine that stands still: they have a moment to go on."""
    running, client = processes
    before = [running.workers(name) for name in MODELS]
    # Once introduced to each other, client and worker need the pool no more.
    client.predict("echo", {"x": x(1)})
    # The worker is over its limit of 1.5 s by the time that anybody looks again, and not done yet.
    future = client.submit("slow", {"ms": ms(2500)}, deadline=time.monotonic() + 20)
    until(lambda: states(client) == [SlotState.RUNNING], "it is at work")
    stopped = [running.pid, running.worker("slow")]
    for pid in stopped:
        send(pid, signal.SIGSTOP)
    began = time.monotonic()
    while time.monotonic() < began + 2:
        assert client.predict("echo", {"x": x(1)})["y"] == 1
    for pid in stopped:
        send(pid, signal.SIGCONT)
    assert future.result()["ms"] == 2500
    assert [running.workers(name) for name in MODELS] == before


def test_killing_the_pool_leaves_no_process(processes: Both) -> None:
    running, client = processes
    call = predicting(client, "slow", ms=ms(1000))
    wait_depth(client, "slow", 1)
    pids = tree(running.pid)
    assert len([pid for pid in pids if title(pid).startswith("headrace worker")]) == 4
    running.kill()
    until(lambda: not any(alive(pid) for pid in pids), "workers and trackers are gone", 2)
    assert isinstance(call.failure(2), PoolLost)
    running.start()
    lost = client._connection
    until(lambda: client._connection is not lost, "connected anew")


def test_a_pool_that_ends_leaves_nothing(processes: Both) -> None:
    running, _ = processes
    pids = tree(running.pid)
    assert running.terminate() == 0
    until(lambda: not any(alive(pid) for pid in pids), "workers and trackers are gone", 2)
    assert sorted(path.name for path in running.directory.iterdir()) == ["headrace.toml", "pool.lock", "pool.log"]
    assert "Traceback" not in running.log() and "tracker" not in running.log()
    running.start()


def test_two_pools_side_by_side(processes: Both) -> None:
    running, client = processes
    with pool({"echo": {"model": "Echo"}}) as other:
        with client_of(other.socket_path) as others:
            wait_replicas(others, "echo")
            assert others.predict("echo", {"x": x(1)})["y"] == 1
            other.kill()
        assert client.predict("echo", {"x": x(1)})["y"] == 1
    assert running.process.poll() is None


def test_a_second_pool_on_the_same_socket_is_refused(processes: Both) -> None:
    running, client = processes
    first = running.process
    running.start()
    second, running.process = running.process, first
    assert second.wait(20) == 1
    assert f"headrace: another pool listens at {running.socket_path}\n" in running.log()
    assert client.predict("echo", {"x": x(1)})["y"] == 1
    with client_of(running.socket_path) as another:
        wait_replicas(another, "echo")


CLIENT = """
import sys, time
import numpy as np
from workers import ThreadClient
client = ThreadClient(sys.argv[1])
client.start()
client.wait_ready()
small = [client.submit("slow", {"ms": np.array([300], np.float32)}) for _ in range(20)]
large = [client.submit("pair", {"x": np.ones((1, 1 << 19), np.float32)}) for _ in range(4)]
print("submitted", flush=True)
sys.stdin.read()
"""


def test_a_dead_clients_tasks_and_memory_are_dropped(processes: Both) -> None:
    running, client = processes
    client.predict("slow", {"ms": ms(1)})
    for _ in range(20):
        client.predict("pair", {"x": x(1)})
    workers = [*running.workers("slow"), *running.workers("pair")]
    # One replica of the pair may have been quick enough to leave the other nothing.
    before = {pid: arenas(pid) for pid in (running.pid, *workers)}
    dead = subprocess.Popen(
        [sys.executable, "-c", CLIENT, running.socket_path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dead.stdout is not None and dead.stdin is not None
    assert dead.stdout.readline() == "submitted\n"
    dead.kill()
    dead.wait()
    dead.stdin.close()
    dead.stdout.close()
    began = time.monotonic()
    client.predict("slow", {"ms": ms(1)}, deadline=began + 20)
    # At most what was running when it died; its other tasks would have taken 6 s.
    assert time.monotonic() - began < 2
    for pid, held in before.items():
        until(lambda pid=pid, held=held: arenas(pid) == held and not spills(pid), f"{pid} has let go of its memory")  # type: ignore[misc]
    assert [*running.workers("slow"), *running.workers("pair")] == workers


def test_a_client_that_talks_nonsense_is_dropped_and_nobody_else(processes: Both) -> None:
    running, client = processes
    for packet in (b"nonsense", b"[]", b'["Register",{"pid":1}]', b'["Nobody",{}]', b'["Spill",{"spill":7}]', b"\xff"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(running.socket_path)
            assert b"Welcome" in sock.recv(4096)
            sock.send(packet)
            assert sock.recv(4096) == b""
    assert client.predict("echo", {"x": x(1)})["y"] == 1

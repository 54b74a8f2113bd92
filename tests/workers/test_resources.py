"""What a pool and its models take of the machine, and that it is given back: threads, memory, descriptors."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.workers.drivers import Call, client_of, client_with, x
from tests.workers.pools import PoolProcess, alive, arenas, core, pool, send, tree, until, wait_replicas, wait_state
from workers import PoolLost, State, ThreadClient

MODELS: dict[str, dict[str, object]] = {"echo": {"model": "Echo"}, "pair": {"model": "Pid", "replicas": 2}}


@pytest.fixture
def running() -> Iterator[PoolProcess]:
    with pool(MODELS) as it:
        yield it


@pytest.fixture
def client(running: PoolProcess) -> Iterator[ThreadClient]:
    with client_with(running.socket_path, *MODELS) as it:
        yield it
        wait_replicas(it, *MODELS)


def test_each_model_has_the_threads_it_is_configured_with() -> None:
    model = "tests.models.strange:Threads"
    models: dict[str, dict[str, object]] = {
        "default": {"model": model},
        "one": {"model": model, "threads": 1},
        "three": {"model": model, "threads": 3},
    }
    with pool(models) as running, client_of(running.socket_path) as client:
        wait_replicas(client, *models)
        answers = {name: int(client.predict(name, {"x": x(1)})["threads"][0]) for name in models}
        assert answers == {"default": 1, "one": 1, "three": 3}
        # A replacement has them, too.
        send(running.worker("one"), signal.SIGKILL)
        assert client.predict("one", {"x": x(1)})["threads"] == 1


def test_replicas_share_weights_that_nobody_can_change() -> None:
    mb = 64
    models: dict[str, dict[str, object]] = {"big": {"model": "BigWeights", "replicas": 2, "options": {"mb": mb}}}
    with pool(models) as running, client_of(running.socket_path) as client:
        wait_replicas(client, "big")
        seen = set()

        def both() -> bool:
            answer = client.predict("big", {"x": np.ones(1, np.float32)})
            assert answer["y"] == 2 and not answer["writable"]
            seen.add(int(answer["pid"][0]))
            return len(seen) == 2

        until(both, "both replicas have read their weights")
        shares = [weights_pss(pid) for pid in running.workers("big")]
        assert sum(shares) == pytest.approx(mb << 20, rel=0.05), shares
        # Nor has any of them, the one that made the weights included, kept a copy.
        assert max(map(anonymous, running.workers("big"))) < (mb << 20) / 2
        # One that comes later shares them, too.
        send(running.workers("big")[0], signal.SIGKILL)
        seen.clear()
        wait_replicas(client, "big")
        until(both, "both replicas have read their weights")
        assert sum(map(weights_pss, running.workers("big"))) == pytest.approx(mb << 20, rel=0.05)
        assert max(map(anonymous, running.workers("big"))) < (mb << 20) / 2


def anonymous(pid: int) -> int:
    """Bytes of the process's memory that are no file's."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Anonymous: +(\d+) kB", text, re.MULTILINE)[0]) << 10


def weights_pss(pid: int) -> int:
    """Bytes of the weights' mapping that fall to this process, shared pages in part."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    return sum(int(kb) << 10 for kb in re.findall(r"headrace-weights.*\n(?:[A-Z].*kB\n)*?Pss: +(\d+) kB", text))


def test_too_little_memory_for_an_arena_is_said_with_both_figures(caplog: pytest.LogCaptureFixture) -> None:
    slots = [[4096, 16], [1 << 40, 1000]]
    with (
        caplog.at_level(logging.ERROR, "headrace.client"),
        pool({"echo": {"model": "Echo"}}, {"slots": slots}) as running,
        client_of(running.socket_path) as client,
    ):
        needed = 4096 + sum(size * count for size, count in slots)
        until(
            lambda: re.search(rf"shared memory of {needed} bytes is needed and \d+ bytes are available", caplog.text),
            "the client says why it cannot use the pool",
        )
        with pytest.raises(PoolLost):
            client.predict("echo", {"x": x(1)})
        assert running.process.poll() is None


def test_twenty_starts_and_kills_of_the_whole_tree_leave_nothing(tmp_path: Path) -> None:
    arena: dict[str, object] = {"slots": [[4096, 16], [16 << 20, 2]]}
    running = PoolProcess(tmp_path, {"echo": {"model": "Echo"}}, arena)
    before = shared_memory()
    try:
        for _ in range(20):
            with client_of(running.socket_path) as client:
                wait_state(client, State.READY, "echo")
                assert client.predict("echo", {"x": x(1)})["y"] == 1
                pids = [running.pid, *tree(running.pid)]
                for pid in pids:
                    send(pid, signal.SIGKILL)
                running.process.wait(20)
                until(lambda: not any(alive(pid) for pid in pids), "nothing lives on")  # noqa: B023
            running.start()
        with client_of(running.socket_path) as client:
            wait_state(client, State.READY, "echo")
    finally:
        running.stop()
    # Twenty arenas would be 640 MiB. Others on this machine may take and give at the same time.
    until(lambda: shared_memory() < before + (256 << 20), "the memory is given back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace.toml", "pool.lock", "pool.log"]


def shared_memory() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(re.findall(r"^Shmem: +(\d+) kB", text, re.MULTILINE)[0]) << 10


def test_many_clients_come_and_go(running: PoolProcess, client: ThreadClient) -> None:
    held = running.held()
    stop = threading.Event()

    def keep_asking() -> int:
        asked = 0
        while not stop.is_set():
            assert client.predict("echo", {"x": x(asked % 1000)})["y"] == asked % 1000
            asked += 1
        return asked

    asking = Call(keep_asking)
    for _ in range(20):
        with client_of(running.socket_path) as other:
            wait_state(other, State.READY, "echo")
            other.predict("echo", {"x": x(1)})
    stop.set()
    assert asking.result()
    until(lambda: running.held() == held, "the pool holds nothing of them")
    until(lambda: arenas(running.worker("echo")) == 1, "nor does the worker")
    assert core(client).leased == 0


def test_a_pool_without_descriptors_serves_on_and_recovers(running: PoolProcess, client: ThreadClient) -> None:
    client.predict("echo", {"x": x(1)})
    held = running.held()
    highest = max(map(int, os.listdir(f"/proc/{running.pid}/fd")))
    soft, hard = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        send(running.worker("echo"), signal.SIGKILL)
        until(lambda: "cannot be started" in client.statuses()["echo"].reason, "it says what is wrong")
        assert client.predict("pair", {"x": x(1)})["rows"] == 1
    finally:
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert client.predict("echo", {"x": x(1)}, deadline=time.monotonic() + 20)["y"] == 1
    wait_replicas(client, *MODELS)
    until(lambda: running.held() == held, "no descriptor was lost")

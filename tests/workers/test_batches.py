"""Which tasks run together, as the rows tell that a model saw at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.workers.drivers import Call, client_with, x
from tests.workers.pools import PoolProcess, alive, pool, queued, send, state_of, until, wait_replicas
from workers import Future, ThreadClient

MODELS: dict[str, dict[str, object]] = {
    "greedy": {"model": "Pid", "max_batch": 16},
    "patient": {"model": "Pid", "max_batch": 4, "max_delay_ms": 300},
    "waiting": {"model": "Pid", "max_batch": 4, "max_delay_ms": 10_000},
    "pair": {"model": "Pid", "max_batch": 8, "max_delay_ms": 500, "replicas": 2},
    "stopped": {"model": "Pid", "max_batch": 8, "max_delay_ms": 500},
    "shared": {"model": "Pid", "max_batch": 8, "max_delay_ms": 1000},
}


@pytest.fixture(scope="module")
def running() -> Iterator[PoolProcess]:
    with pool(MODELS) as it, client_with(it.socket_path, *MODELS):
        yield it


@pytest.fixture
def client(running: PoolProcess) -> Iterator[ThreadClient]:
    with client_with(running.socket_path, *MODELS) as it:
        yield it


def rows_of(futures: list[Future]) -> list[int]:
    return [int(future.result()["rows"][0]) for future in futures]


def test_what_waits_runs_together(client: ThreadClient, running: PoolProcess) -> None:
    worker = running.worker("greedy")
    send(worker, signal.SIGSTOP)
    until(lambda: state_of(worker) == "T", "stopped")
    futures = [client.submit("greedy", {"x": x(1)}) for _ in range(20)]
    send(worker, signal.SIGCONT)
    # It may have been woken by the first.
    assert sorted(rows_of(futures))[-16:] == [16] * 16


def test_tasks_of_several_clients_run_together(client: ThreadClient, running: PoolProcess) -> None:
    with client_with(running.socket_path, *MODELS) as other:
        futures = [either.submit("shared", {"x": x(1)}) for _ in range(4) for either in (client, other)]
        assert rows_of(futures) == [8] * 8


def test_concurrent_callers_share_batches(client: ThreadClient) -> None:
    def ask() -> list[int]:
        return [int(client.predict("patient", {"x": x(1)})["rows"][0]) for _ in range(3)]

    calls = [Call(ask) for _ in range(8)]
    rows = [n for call in calls for n in call.result()]  # type: ignore[attr-defined]
    assert len(rows) / sum(1 / n for n in rows) > 2, "mean size of a batch"


def test_a_lone_task_waits_for_mates_as_long_as_it_may(client: ThreadClient) -> None:
    began = time.monotonic()
    assert rows_of([client.submit("patient", {"x": x(1)})]) == [1]
    assert 0.29 < time.monotonic() - began < 1


def test_a_full_batch_does_not_wait(client: ThreadClient) -> None:
    began = time.monotonic()
    assert rows_of([client.submit("waiting", {"x": x(1)}) for _ in range(4)]) == [4] * 4
    assert time.monotonic() - began < 2


def test_two_replicas_do_not_split_a_batch(client: ThreadClient) -> None:
    for _ in range(5):
        assert rows_of([client.submit("pair", {"x": x(1)}) for _ in range(8)]) == [8] * 8


def test_a_worker_stopped_while_it_gathers_is_replaced(client: ThreadClient, running: PoolProcess) -> None:
    """What it holds is in no queue; it is answered all the same."""
    worker = running.worker("stopped")
    future = client.submit("stopped", {"x": x(1)})
    until(lambda: queued(client, "stopped") == 0, "it has taken the task", 0.4)
    send(worker, signal.SIGSTOP)
    answer = future.result(10)
    assert answer["pid"] != worker
    assert not alive(worker)
    wait_replicas(client, "stopped")

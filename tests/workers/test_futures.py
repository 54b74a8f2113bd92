"""What only the client for threads has: futures, that many threads may ask, and a part in programs that fork."""

from __future__ import annotations

import os
import select
import signal
import time
import traceback
from collections.abc import Iterator

import numpy as np
import pytest

from tests.workers.drivers import Busy, Call, client_of, client_with, ms, refusal, x
from tests.workers.pools import PoolProcess, core, forked, pool, targets, until, wait_free, wait_state
from workers import Cancelled, InvalidInput, PoolLost, State, ThreadClient

MODELS: dict[str, dict[str, object]] = {
    "echo": {"model": "Echo", "replicas": 2},
    "slow": {"model": "Slow", "max_batch": 1, "max_queue": 4},
    "particular": {"model": "Particular"},
}
LARGEST_SLOT = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[PoolProcess]:
    with pool(MODELS) as it, client_with(it.socket_path, *MODELS):
        yield it


@pytest.fixture
def client(running: PoolProcess) -> Iterator[ThreadClient]:
    with client_with(running.socket_path, *MODELS) as it:
        yield it


@pytest.fixture
def busy(client: ThreadClient, running: PoolProcess) -> Iterator[Busy]:
    it = Busy(client, running.worker("slow"))
    yield it
    it.end()


# Futures.


def test_a_future_is_taken_once_or_many_times(client: ThreadClient) -> None:
    future = client.submit("echo", {"x": x(7)})
    assert future.result() is future.result()
    assert future.done()


def test_threads_that_ask_one_future_all_have_its_answer(client: ThreadClient) -> None:
    for n in range(40):
        future = client.submit("echo", {"x": np.full((1, 5000), n, np.float32)})
        calls = [Call(future.result) for _ in range(3)]
        assert {float(call.result()["y"].sum()) for call in calls} == {5000.0 * n}  # type: ignore[index]
    wait_free(client)


def test_threads_that_wait_for_one_future_are_all_woken(client: ThreadClient, busy: Busy) -> None:
    future = client.submit("slow", {"ms": ms(0)})
    calls = [Call(future.wait) for _ in range(4)]
    until(lambda: len(client._followers) == 4, "all wait, behind the one that reads")
    assert future.cancel()
    for call in calls:
        call.join(0.5)


def test_an_answer_is_taken_once(client: ThreadClient) -> None:
    body = client.submit_body("echo", b'{"x":[1]}', "json-row")
    assert body.body() == body.body()
    with pytest.raises(RuntimeError, match="taken already"):
        body.result()
    future = client.submit("echo", {"x": x(7)})
    with future.answer():
        for again in (future.result, future.answer, future.body):
            with pytest.raises(RuntimeError, match="taken already"):
                again()
        assert not future.cancel()
        assert core(client).leased == 1
    wait_free(client)


def test_a_failure_is_the_same_whenever_it_is_asked_for(client: ThreadClient) -> None:
    future = client.submit("particular", {"x": x(-2)})
    for ask in (future.result, future.result, future.body, future.answer):
        with pytest.raises(InvalidInput, match="'x' must not be -2"):
            ask()
        client.predict("echo", {"x": x(1)})


def test_cancelling_while_the_answer_is_taken(client: ThreadClient) -> None:
    values = np.full((1, 5000), 7, np.float32)
    for _ in range(100):
        future = client.submit("echo", {"x": values})
        taking = Call(future.result)
        while not future.done():
            pass
        assert not future.cancel()
        taking.join()
        if taking.error is None:
            assert (taking.result()["y"] == values).all()  # type: ignore[index]
        else:
            assert isinstance(taking.failure(), Cancelled)
    wait_free(client)


def test_an_answer_that_is_never_looked_at_gives_its_slot_back(client: ThreadClient) -> None:
    future = client.submit("echo", {"x": x(1)})
    future.answer()
    assert core(client).leased == 0


def test_an_answer_is_a_view_of_shared_memory(client: ThreadClient) -> None:
    with client.submit("echo", {"x": x(7, 8)}).answer() as outputs:
        assert outputs["y"].base is not None
        assert outputs["y"].tolist() == [[7, 8]]


def test_a_future_times_out_and_can_be_asked_again(client: ThreadClient) -> None:
    future = client.submit("slow", {"ms": ms(300)})
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert future.result()["ms"] == 300


def test_forgotten_futures_give_their_slots_back(client: ThreadClient) -> None:
    for _ in range(300):
        client.submit("echo", {"x": x(1)})
        wait_free_enough(client)
    future = client.submit("echo", {"x": x(1)})
    future.wait()
    del future
    wait_free(client)


def wait_free_enough(client: ThreadClient) -> None:
    until(lambda: core(client).leased < 50, "room for more")


def test_a_future_answered_before_the_pool_was_lost() -> None:
    with pool({"echo": {"model": "Echo"}}) as running, client_of(running.socket_path) as client:
        wait_state(client, State.READY, "echo")
        future = client.submit("echo", {"x": x(1)})
        body = client.submit_body("echo", b'{"x":[1]}', "json-row")
        future.wait()
        body.wait()
        running.kill()
        until(lambda: isinstance(refusal(client), PoolLost), "the loss is seen")
        with pytest.raises(PoolLost):
            future.result()
        with pytest.raises(PoolLost):
            body.body()


@pytest.mark.parametrize("size", [2, LARGEST_SLOT])
def test_an_answer_is_there_to_the_end_of_its_block_whatever_befalls_the_pool(size: int) -> None:
    with pool({"echo": {"model": "Echo"}}) as running, client_of(running.socket_path) as client:
        wait_state(client, State.READY, "echo")
        values = np.arange(size, dtype=np.float32)[None]
        with client.submit("echo", {"x": values}).answer() as outputs:
            running.kill()
            until(lambda: isinstance(refusal(client), PoolLost), "the loss is seen")
            assert (outputs["y"] == values).all()


def test_cancelling_wakes_whoever_waits(client: ThreadClient, busy: Busy) -> None:
    """Both the one thread that reads and one that follows it."""
    futures = [client.submit("slow", {"ms": ms(0)}) for _ in range(3)]
    calls = [Call(future.result) for future in futures]
    for future, call in zip(futures, calls, strict=True):
        assert future.cancel()
        assert isinstance(call.failure(0.5), Cancelled)


# Forks.


def test_a_forked_child_has_no_part_in_it(client: ThreadClient, busy: Busy) -> None:
    """Neither answers nor cancels nor reads what is the parent's, and leaves the parent's task alone."""
    future = client.submit("slow", {"ms": ms(1)})
    settled = client.submit("echo", {"x": x(5)})
    settled.wait()
    waiter = Call(client.submit("slow", {"ms": ms(2)}).result)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lost = 0
            for ask in (future.result, settled.result, lambda: client.predict("echo", {"x": x(1)})):
                try:
                    ask()
                except PoolLost:
                    lost += 1
            future.cancel()
            del future, settled, ask
            held = [target for target in targets(os.getpid()) if target.startswith("/memfd:headrace")]
            status = 0 if lost == 3 and not held else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    busy.end()
    assert future.result()["ms"] == 1
    assert settled.result()["y"] == 5
    assert waiter.result()["ms"] == 2  # type: ignore[index]


def test_a_fork_while_other_threads_hold_every_lock_hangs_nobody(client: ThreadClient) -> None:
    connection = client._connection
    assert connection is not None
    with connection.link._sending, client._changed, client._reader:
        child = os.fork()
    if child == 0:
        status = 1
        try:
            client.wait_introduced(0)
            client.predict("echo", {"x": x(1)})
        except PoolLost:
            client.close()
            status = 0
        finally:
            os._exit(status)
    gone = select.poll()
    pidfd = os.pidfd_open(child)
    gone.register(pidfd)
    if not gone.poll(5000):
        os.kill(child, signal.SIGKILL)
    os.close(pidfd)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_does_not_hold_the_pools_end_up() -> None:
    with pool({"echo": {"model": "Echo"}}) as running, client_of(running.socket_path) as client:
        wait_state(client, State.READY, "echo")
        with forked():
            began = time.monotonic()
            assert running.terminate() == 0
            assert time.monotonic() - began < 5

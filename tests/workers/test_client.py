"""The contract of every client of the pool. Run as it is for threads, and under `python -m gevent.monkey --module
pytest` for gevent's hub."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator

import numpy as np
import pytest

from tests.models.zoo import huge
from tests.workers.drivers import PATCHED, Call, Driver, Pending, client_of, predicting, wait_depth, x
from tests.workers.pools import (
    PATIENCE_S,
    PoolProcess,
    core,
    pool,
    send,
    targets,
    until,
    wait_free,
    wait_replicas,
    wait_state,
)
from workers import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    ModelNotFound,
    NotReady,
    Overloaded,
    PoolError,
    PoolLost,
    Refused,
    State,
    TooLarge,
    WorkerDied,
)
from workers.records import SlotState

MODELS: dict[str, dict[str, object]] = {
    "echo": {"model": "Echo", "replicas": 2},
    "tag": {"model": "DelayedTag", "max_batch": 8},
    "slow": {"model": "Slow", "max_batch": 1, "max_queue": 4},
    "huge": {"model": "Huge"},
    "nan": {"model": "Nan"},
    "particular": {"model": "Particular"},
    "exit0": {"model": "Exit0"},
    "refusing": {"model": "Refusing"},
    "loading": {"model": "SlowLoad", "options": {"seconds": 100.0}},
}
READY = [name for name in MODELS if name not in ("refusing", "loading")]
SPILL_LIMIT = 16 << 20
LARGEST_SLOT = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[PoolProcess]:
    with pool(MODELS) as it, client_of(it.socket_path) as client:
        wait_state(client, State.REFUSED, "refusing")
        wait_replicas(client, *READY)
        yield it


@pytest.fixture
def client(running: PoolProcess) -> Iterator[Driver]:
    with client_of(running.socket_path) as it:
        wait_state(it, State.READY, *READY)
        yield it
        wait_free(it)


@pytest.fixture
def busy(client: Driver, running: PoolProcess) -> Iterator[Busy]:
    it = Busy(client, running.worker("slow"))
    yield it
    it.end()


class Busy:
    """The only worker of `slow` is at work until this ends: it is stopped in the middle."""

    def __init__(self, client: Driver, worker: int) -> None:
        self._worker = worker
        self._call = predicting(client, "slow", ms=np.array([1000.0], np.float32))
        until(lambda: self._is_running(client), "the worker has begun")
        send(worker, signal.SIGSTOP)

    def _is_running(self, client: Driver) -> bool:
        inside = core(client)
        states = [inside.arena.words[task.base >> 3] & 0xFF for task in list(inside._tasks.values())]
        return states == [SlotState.RUNNING]

    def end(self) -> None:
        send(self._worker, signal.SIGCONT)
        self._call.result()


# Right answers.


def test_answers_are_exact(client: Driver) -> None:
    values = np.array([[0.1, -0.0, 3.4028235e38, 1e-45, math.pi]], np.float32)
    answer = client.predict("echo", {"x": values})
    assert list(answer) == ["y"]
    assert answer["y"].dtype == np.float32 and answer["y"].shape == (1, 5)
    assert answer["y"].tobytes() == values.tobytes()


def test_the_answer_is_the_callers_to_keep_and_to_change(client: Driver) -> None:
    answers = [client.predict("echo", {"x": x(value)})["y"] for value in range(600)]
    for answer in answers:
        answer += 1
    assert [float(answer[0, 0]) for answer in answers] == [value + 1.0 for value in range(600)]


def test_inputs_in_any_byte_order_and_with_any_strides(client: Driver) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    for same in (values.astype(">f4"), np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2]):
        assert (client.predict("echo", {"x": same})["y"] == values).all()


def test_a_length_of_zero(client: Driver) -> None:
    assert client.predict("echo", {"x": np.empty((2, 0), np.float32)})["y"].shape == (2, 0)


def test_a_whole_batch_of_rows_from_one_caller(client: Driver) -> None:
    values = np.arange(32, dtype=np.float32)[:, None]
    assert (client.predict("echo", {"x": values})["y"] == values).all()


def test_many_callers_each_get_their_own_answer(client: Driver) -> None:
    def ask(caller: int) -> int:
        random = np.random.default_rng(caller)
        right = 0
        for _ in range(50):
            rows = int(random.integers(1, 4))
            nonce = random.integers(0, 1 << 63, rows, np.uint64)
            ms = np.zeros(rows, np.float32)
            right += int((client.predict("tag", {"nonce": nonce, "ms": ms})["nonce"] == nonce).all())
        return right

    calls = [Call(lambda caller=caller: ask(caller)) for caller in range(32)]  # type: ignore[misc]
    assert [call.result() for call in calls] == [50] * 32


def test_a_raw_body_is_decoded_and_answered_by_the_worker(client: Driver) -> None:
    assert json.loads(client.predict_body("echo", b'{"x":[1,2.5,3]}', "json-row")) == {"y": [1, 2.5, 3]}


def test_a_raw_body_larger_than_any_slot(client: Driver) -> None:
    values = [float(i) for i in range(LARGEST_SLOT // 4)]
    body = json.dumps({"x": values}).encode()
    assert len(body) > LARGEST_SLOT
    assert json.loads(client.predict_body("echo", body, "json-row")) == {"y": values}


@pytest.mark.parametrize("size", [4096, 65536, LARGEST_SLOT, LARGEST_SLOT + 4, 8 << 20])
def test_inputs_of_every_size(client: Driver, size: int) -> None:
    values = np.arange(size // 4, dtype=np.float32)[None]
    assert client.predict("echo", {"x": values})["y"].tobytes() == values.tobytes()


@pytest.mark.parametrize("size", [1, 4096, 65536, LARGEST_SLOT, 8 << 20])
def test_outputs_of_every_size(client: Driver, size: int) -> None:
    assert (client.predict("huge", {"n": np.array([size])})["y"] == huge(size)).all()


def test_many_that_spill_at_once(client: Driver) -> None:
    def ask(caller: int) -> bool:
        values = np.full((1, LARGEST_SLOT // 4 + caller), caller, np.float32)
        return all(client.predict("echo", {"x": values})["y"].tobytes() == values.tobytes() for _ in range(6))

    calls = [Call(lambda caller=caller: ask(caller)) for caller in range(12)]  # type: ignore[misc]
    assert [call.result() for call in calls] == [True] * 12


def test_nothing_is_kept_of_what_spilled(client: Driver, running: PoolProcess) -> None:
    big = np.ones((1, LARGEST_SLOT // 4), np.float32)

    def ask() -> None:
        client.predict("echo", {"x": big})
        client.predict("huge", {"n": np.array([2 << 20])})
        client.predict_body("echo", b'{"x":[1]}' + b" " * LARGEST_SLOT, "json-row")

    for _ in range(4):
        ask()
    for pid in (*running.workers("echo"), *running.workers("huge"), running.pid, os.getpid()):
        until(lambda pid=pid: not spills_of(pid), f"process {pid} holds no spill")  # type: ignore[misc]


def spills_of(pid: int) -> list[str]:
    return [target for target in targets(pid) if "headrace-spill" in target]


# Whatever is wrong has its own kind.


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({}, "input 'x' is missing"),
        ({"x": x(1), "z": x(1)}, "there is no input 'z'; the inputs are 'x'"),
        ({"x": np.ones((1, 2))}, "input 'x' is float64, declared float32"),
        ({"x": np.ones(3, np.float32)}, "input 'x' has shape [3], declared [-1, -1]"),
        ({"x": np.ones((0, 3), np.float32)}, "0 rows, and between 1 and 32 can be taken at once"),
        ({"x": np.ones((33, 3), np.float32)}, "33 rows, and between 1 and 32 can be taken at once"),
    ],
)
def test_inputs_that_do_not_fit_the_model(client: Driver, inputs: dict[str, np.ndarray], text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        client.predict("echo", inputs)
    assert str(raised.value) == text


def test_a_body_that_does_not_fit_the_model(client: Driver) -> None:
    with pytest.raises(InvalidInput, match="'x' must hold numbers"):
        client.predict_body("echo", b'{"x":["1"]}', "json-row")
    with pytest.raises(InvalidInput, match="invalid json"):
        client.predict_body("echo", b'{"x":[1]', "json-row")


def test_an_unknown_model(client: Driver) -> None:
    with pytest.raises(ModelNotFound, match="'nobody'"):
        client.predict("nobody", {"x": x(1)})


def test_a_model_that_refused_at_load_says_so_and_others_serve(client: Driver) -> None:
    with pytest.raises(Refused) as raised:
        client.predict("refusing", {"x": x(1)})
    assert (raised.value.code, str(raised.value)) == ("LICENSE_FAILED", "a licence is needed")
    assert client.statuses()["refusing"].state is State.REFUSED
    assert client.predict("echo", {"x": x(1)})["y"] == 1


def test_a_model_that_is_still_loading(client: Driver) -> None:
    with pytest.raises(NotReady, match="model 'loading' is loading"):
        client.predict("loading", {"x": x(1)})
    with pytest.raises(NotReady):
        client.admit("loading")


def test_a_models_own_refusal_of_one_task(client: Driver) -> None:
    with pytest.raises(Refused) as raised:
        client.predict("particular", {"x": x(-1)})
    assert (raised.value.code, str(raised.value)) == ("NOT_THIS_ONE", "not this one")
    with pytest.raises(InvalidInput, match="'x' must not be -2"):
        client.predict("particular", {"x": x(-2)})


def test_an_answer_that_json_has_no_form_for(client: Driver) -> None:
    with pytest.raises(InvalidOutput, match="'y' holds NaN or Infinity"):
        client.predict_body("nan", b'{"x":[3]}', "json-row")
    assert np.isnan(client.predict("nan", {"x": x(3)})["y"]).all()


def test_a_model_that_raises(client: Driver) -> None:
    with pytest.raises(ModelFailed, match="0"):
        client.predict("exit0", {"x": x(670)})


def test_a_worker_that_dies_of_a_task_twice(client: Driver) -> None:
    client.predict("exit0", {"x": x(1)})
    with pytest.raises(WorkerDied):
        client.predict("exit0", {"x": x(668)})
    assert client.predict("exit0", {"x": x(1)})["y"] == 1


def test_inputs_over_the_spill_limit(client: Driver) -> None:
    with pytest.raises(TooLarge, match=str(SPILL_LIMIT)):
        client.predict("echo", {"x": np.ones((1, SPILL_LIMIT // 4), np.float32)})
    with pytest.raises(TooLarge, match=str(SPILL_LIMIT)):
        client.predict_body("echo", b" " * (SPILL_LIMIT + 1), "json-row")
    # As broadcast, these terabytes cost nothing before they are refused.
    with pytest.raises(TooLarge):
        client.predict("echo", {"x": np.broadcast_to(np.float32(1), (1, 1 << 40))})


def test_outputs_over_the_spill_limit(client: Driver) -> None:
    with pytest.raises(ModelFailed, match=str(SPILL_LIMIT)):
        client.predict("huge", {"n": np.array([SPILL_LIMIT])})


# Deadlines, cancelling, overload.


def test_a_queued_task_meets_its_deadline_though_the_model_is_busy(client: Driver, busy: Busy) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.predict("slow", {"ms": np.array([0.0], np.float32)}, deadline=began + 0.5)
    assert 0.3 < time.monotonic() - began < 0.7


def test_a_running_task_meets_its_deadline(client: Driver) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.predict("slow", {"ms": np.array([800.0], np.float32)}, deadline=began + 0.3)
    assert 0.1 < time.monotonic() - began < 0.5
    assert core(client).leased == 1, "the worker may still write into that slot"


@pytest.mark.parametrize("deadline", [-1.0, 0.0])
def test_a_deadline_that_has_passed(client: Driver, deadline: float) -> None:
    with pytest.raises(DeadlineExceeded):
        client.predict("echo", {"x": x(1)}, deadline=deadline)


def test_a_deadline_that_never_comes(client: Driver) -> None:
    assert client.predict("echo", {"x": x(1)}, deadline=math.inf)["y"] == 1


def test_late_answers_reach_nobody(client: Driver) -> None:
    """Deadlines about as long as the work takes; every answer that comes is the caller's own."""

    def ask(caller: int) -> tuple[int, int]:
        random = np.random.default_rng(caller)
        right = late = 0
        for _ in range(40):
            nonce = random.integers(0, 1 << 63, 1, np.uint64)
            deadline = time.monotonic() + float(random.uniform(0, 0.01))
            try:
                answer = client.predict("tag", {"nonce": nonce, "ms": np.array([2], np.float32)}, deadline=deadline)
                assert answer["nonce"] == nonce
                right += 1
            except DeadlineExceeded:
                late += 1
        return right, late

    calls = [Call(lambda caller=caller: ask(caller)) for caller in range(8)]  # type: ignore[misc]
    results = np.array([call.result() for call in calls])
    assert results.sum() == 8 * 40
    assert (results.sum(axis=0) > 0).all(), "some in time and some late, or nothing was tried"


def test_a_full_queue_is_overload_at_once(client: Driver, busy: Busy) -> None:
    queued = [predicting(client, "slow", ms=np.array([0.0], np.float32)) for _ in range(4)]
    wait_depth(client, "slow", 5)
    began = time.monotonic()
    with pytest.raises(Overloaded, match="'slow' is full"):
        client.predict("slow", {"ms": np.array([0.0], np.float32)})
    with pytest.raises(Overloaded):
        client.admit("slow")
    assert time.monotonic() - began < 0.05
    assert client.predict("echo", {"x": x(1)})["y"] == 1
    busy.end()
    for call in queued:
        call.result()


def test_a_queued_task_that_is_given_up_is_not_run(client: Driver, busy: Busy) -> None:
    pending = Pending(client, "slow", {"ms": np.array([60_000.0], np.float32)})
    wait_depth(client, "slow", 2)
    pending.give_up()
    assert isinstance(pending.call.failure(0.5), Cancelled)
    pending.close()
    busy.end()
    began = time.monotonic()
    client.predict("slow", {"ms": np.array([0.0], np.float32)})
    assert time.monotonic() - began < 5


def test_giving_up_many_leaves_the_model_to_the_next(client: Driver, busy: Busy) -> None:
    pending = [Pending(client, "slow", {"ms": np.array([60_000.0], np.float32)}) for _ in range(4)]
    wait_depth(client, "slow", 5)
    for one in pending:
        one.give_up()
    for one in pending:
        assert isinstance(one.call.failure(0.5), Cancelled)
        one.close()
    busy.end()
    until(lambda: core(client).under_way == 0, "none of them is run", 5)
    client.predict("slow", {"ms": np.array([0.0], np.float32)}, deadline=time.monotonic() + 5)


def test_a_queue_full_of_what_was_given_up_takes_the_next(client: Driver, busy: Busy) -> None:
    pending = [Pending(client, "slow", {"ms": np.array([60_000.0], np.float32)}) for _ in range(4)]
    wait_depth(client, "slow", 5)
    with pytest.raises(Overloaded):
        client.admit("slow")
    for one in pending:
        one.give_up()
    for one in pending:
        assert isinstance(one.call.failure(0.5), Cancelled)
        one.close()
    call = predicting(client, "slow", ms=np.array([7.0], np.float32))
    wait_depth(client, "slow", 6)
    busy.end()
    assert call.result(5)["ms"] == 7  # type: ignore[index]


@pytest.mark.parametrize("how", ["closed", "ended its side"])
def test_a_task_whose_caller_has_gone_is_cancelled(client: Driver, busy: Busy, how: str) -> None:
    """One that has only ended its side is taken to have gone, too: the two cannot be told apart before an answer."""
    (stays, other), (goes, end) = socket.socketpair(), socket.socketpair()
    inputs = {"ms": np.array([7.0], np.float32)}
    staying = Call(lambda: client.predict("slow", inputs, caller=stays))
    going = [Call(lambda: client.predict("slow", inputs, caller=goes)) for _ in range(2)]
    wait_depth(client, "slow", 4)
    if how == "closed":
        end.close()
    else:
        end.shutdown(socket.SHUT_WR)
    for call in going:
        assert isinstance(call.failure(0.5), Cancelled)
    assert not staying.over
    busy.end()
    assert staying.result(5)["ms"] == 7  # type: ignore[index]
    for one in (stays, other, goes, end):
        one.close()


# Pools come and go.


ONE = {"echo": {"model": "Echo"}, "slow": {"model": "Slow", "max_batch": 1}}


def test_no_pool_is_pool_lost() -> None:
    with client_of("/nonexistent/pool.sock") as client, pytest.raises(PoolLost):
        client.predict("echo", {"x": x(1)})


def test_a_lost_pool_fails_what_is_under_way_and_comes_back() -> None:
    with pool(ONE) as running, client_of(running.socket_path) as client:
        for _ in range(2):
            wait_replicas(client, "echo", "slow")
            calls = [predicting(client, "slow", ms=np.array([30_000.0], np.float32)) for _ in range(5)]
            wait_depth(client, "slow", 5)
            began = time.monotonic()
            running.kill()
            for call in calls:
                assert isinstance(call.failure(), PoolLost)
            assert time.monotonic() - began < 2
            with pytest.raises(PoolLost):
                client.predict("echo", {"x": x(1)})
            running.start()
        wait_replicas(client, "echo", "slow")
        assert client.predict("echo", {"x": x(1)})["y"] == 1


def test_callers_that_never_stop_see_typed_errors_while_pools_are_killed() -> None:
    with pool({"echo": {"model": "Echo"}}) as running, client_of(running.socket_path) as client:
        wait_state(client, State.READY, "echo")
        stop = threading.Event()

        def ask(caller: int) -> int:
            asked = 0
            while not stop.is_set():
                asked += 1
                try:
                    answer = client.predict("echo", {"x": x(caller, asked)})
                    assert answer["y"].tolist() == [[caller, asked]]
                except (PoolLost, NotReady, Draining):
                    # Nothing to be had just now.
                    time.sleep(0.002)
            return asked

        calls = [Call(lambda caller=caller: ask(caller)) for caller in range(6)]  # type: ignore[misc]
        for _ in range(3):
            lost = client._connection
            running.kill()
            running.start()
            until(lambda: client._connection is not lost, "the loss is seen")  # noqa: B023
            wait_state(client, State.READY, "echo")
            assert client.predict("echo", {"x": x(1)})["y"] == 1
        stop.set()
        assert all(call.result() for call in calls)


def test_draining_finishes_what_was_taken_and_refuses_the_rest() -> None:
    with pool(ONE) as running, client_of(running.socket_path) as client:
        wait_replicas(client, "echo", "slow")
        calls = [predicting(client, "slow", ms=np.array([300.0], np.float32)) for _ in range(3)]
        wait_depth(client, "slow", 3)
        send(running.pid, signal.SIGTERM)
        until(lambda: isinstance(refusal(client), Draining), "no more is taken")
        for call in calls:
            call.result()
        assert running.process.wait(PATIENCE_S) == 0
        until(lambda: isinstance(refusal(client), PoolLost), "the pool is gone")


def refusal(client: Driver) -> PoolError | None:
    try:
        client.admit("echo")
    except PoolError as error:
        return error
    return None


def test_closing_ends_every_wait(running: PoolProcess) -> None:
    with client_of(running.socket_path) as client:
        wait_state(client, State.READY, *READY)
        calls = [predicting(client, "tag", nonce=np.ones(1, np.uint64), ms=np.array([500], np.float32))]
        calls += [predicting(client, "tag", nonce=np.ones(1, np.uint64), ms=np.array([500], np.float32))]
        wait_depth(client, "tag", 2)
        client.close()
        for call in calls:
            assert isinstance(call.failure(1), PoolLost)
        with pytest.raises(PoolLost):
            client.predict("echo", {"x": x(1)})


# What only one of the drivers has.

if not PATCHED:

    def test_a_future_is_taken_once_or_many_times(client: Driver) -> None:
        future = client.submit("echo", {"x": x(7)})
        assert future.result() is future.result()
        assert future.done()

    def test_threads_that_ask_one_future_all_have_its_answer(client: Driver) -> None:
        for n in range(40):
            future = client.submit("echo", {"x": np.full((1, 5000), n, np.float32)})
            calls = [Call(future.result) for _ in range(3)]
            assert {float(call.result()["y"].sum()) for call in calls} == {5000.0 * n}  # type: ignore[index]
        wait_free(client)

    def test_threads_that_wait_for_one_future_are_all_woken(client: Driver, busy: Busy) -> None:
        future = client.submit("slow", {"ms": np.array([0.0], np.float32)})
        calls = [Call(future.wait) for _ in range(4)]
        until(lambda: len(client._followers) == 4, "all wait, behind the one that reads")
        assert future.cancel()
        for call in calls:
            call.join(0.5)

    def test_an_answer_is_taken_once(client: Driver) -> None:
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

    def test_a_failure_is_the_same_whenever_it_is_asked_for(client: Driver) -> None:
        future = client.submit("particular", {"x": x(-2)})
        for ask in (future.result, future.result, future.body, future.answer):
            with pytest.raises(InvalidInput, match="'x' must not be -2"):
                ask()
            client.predict("echo", {"x": x(1)})

    def test_cancelling_while_the_answer_is_taken(client: Driver) -> None:
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

    def test_an_answer_that_is_never_looked_at_gives_its_slot_back(client: Driver) -> None:
        future = client.submit("echo", {"x": x(1)})
        future.answer()
        assert core(client).leased == 0

    def test_an_answer_is_a_view_of_shared_memory(client: Driver) -> None:
        with client.submit("echo", {"x": x(7, 8)}).answer() as outputs:
            assert outputs["y"].base is not None
            assert outputs["y"].tolist() == [[7, 8]]

    def test_a_future_times_out_and_can_be_asked_again(client: Driver) -> None:
        future = client.submit("slow", {"ms": np.array([300.0], np.float32)})
        with pytest.raises(TimeoutError):
            future.result(0.05)
        assert future.result()["ms"] == 300

    def test_forgotten_futures_give_their_slots_back(client: Driver) -> None:
        for _ in range(300):
            client.submit("echo", {"x": x(1)})
            wait_free_enough(client)
        future = client.submit("echo", {"x": x(1)})
        future.wait()
        del future
        wait_free(client)

    def wait_free_enough(client: Driver) -> None:
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

    def test_cancelling_wakes_whoever_waits(client: Driver, busy: Busy) -> None:
        """Both the one thread that reads and one that follows it."""
        futures = [client.submit("slow", {"ms": np.array([0.0], np.float32)}) for _ in range(3)]
        calls = [Call(future.result) for future in futures]
        for future, call in zip(futures, calls, strict=True):
            assert future.cancel()
            assert isinstance(call.failure(0.5), Cancelled)

    def test_a_forked_child_has_no_part_in_it(client: Driver, busy: Busy) -> None:
        """Neither answers nor cancels nor reads what is the parent's, and leaves the parent's task alone."""
        future = client.submit("slow", {"ms": np.array([1.0], np.float32)})
        settled = client.submit("echo", {"x": x(5)})
        settled.wait()
        waiter = Call(client.submit("slow", {"ms": np.array([2.0], np.float32)}).result)
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

    def test_a_fork_while_other_threads_hold_every_lock_hangs_nobody(client: Driver) -> None:
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
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            os.close(read)
            began = time.monotonic()
            assert running.terminate() == 0
            assert time.monotonic() - began < 5
            os.close(write)
            os.waitpid(child, 0)

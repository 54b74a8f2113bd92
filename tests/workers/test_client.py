"""The contract of every client of the pool. Run as it is for threads, and under `python -m gevent.monkey --module
pytest` for gevent's hub."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.models.zoo import huge
from tests.workers.drivers import Busy, Call, Driver, Pending, client_of, ms, predicting, refusal, wait_depth, x
from tests.workers.pools import (
    PATIENCE_S,
    PoolProcess,
    core,
    pool,
    send,
    spills,
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
    PoolLost,
    Refused,
    State,
    TooLarge,
    WorkerDied,
)

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
        until(lambda pid=pid: not spills(pid), f"process {pid} holds no spill")  # type: ignore[misc]


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
        client.predict("slow", {"ms": ms(0)}, deadline=began + 0.5)
    assert 0.3 < time.monotonic() - began < 0.7


def test_a_running_task_meets_its_deadline(client: Driver) -> None:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.predict("slow", {"ms": ms(800)}, deadline=began + 0.3)
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
    queued = [predicting(client, "slow", ms=ms(0)) for _ in range(4)]
    wait_depth(client, "slow", 5)
    began = time.monotonic()
    with pytest.raises(Overloaded, match="'slow' is full"):
        client.predict("slow", {"ms": ms(0)})
    with pytest.raises(Overloaded):
        client.admit("slow")
    assert time.monotonic() - began < 0.05
    assert client.predict("echo", {"x": x(1)})["y"] == 1
    busy.end()
    for call in queued:
        call.result()


def test_a_queued_task_that_is_given_up_is_not_run(client: Driver, busy: Busy) -> None:
    pending = Pending(client, "slow", {"ms": ms(60_000)})
    wait_depth(client, "slow", 2)
    pending.give_up()
    assert isinstance(pending.call.failure(0.5), Cancelled)
    pending.close()
    busy.end()
    began = time.monotonic()
    client.predict("slow", {"ms": ms(0)})
    assert time.monotonic() - began < 5


def test_giving_up_many_leaves_the_model_to_the_next(client: Driver, busy: Busy) -> None:
    pending = [Pending(client, "slow", {"ms": ms(60_000)}) for _ in range(4)]
    wait_depth(client, "slow", 5)
    for one in pending:
        one.give_up()
    for one in pending:
        assert isinstance(one.call.failure(0.5), Cancelled)
        one.close()
    busy.end()
    until(lambda: core(client).under_way == 0, "none of them is run", 5)
    client.predict("slow", {"ms": ms(0)}, deadline=time.monotonic() + 5)


def test_a_queue_full_of_what_was_given_up_takes_the_next(client: Driver, busy: Busy) -> None:
    pending = [Pending(client, "slow", {"ms": ms(60_000)}) for _ in range(4)]
    wait_depth(client, "slow", 5)
    with pytest.raises(Overloaded):
        client.admit("slow")
    for one in pending:
        one.give_up()
    for one in pending:
        assert isinstance(one.call.failure(0.5), Cancelled)
        one.close()
    call = predicting(client, "slow", ms=ms(7))
    wait_depth(client, "slow", 6)
    busy.end()
    assert call.result(5)["ms"] == 7  # type: ignore[index]


@pytest.mark.parametrize("how", ["closed", "ended its side"])
def test_a_task_whose_caller_has_gone_is_cancelled(client: Driver, busy: Busy, how: str) -> None:
    """One that has only ended its side is taken to have gone, too: the two cannot be told apart before an answer."""
    (stays, other), (goes, end) = socket.socketpair(), socket.socketpair()
    inputs = {"ms": ms(7)}
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
            calls = [predicting(client, "slow", ms=ms(30_000)) for _ in range(5)]
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
        calls = [predicting(client, "slow", ms=ms(300)) for _ in range(3)]
        wait_depth(client, "slow", 3)
        send(running.pid, signal.SIGTERM)
        until(lambda: isinstance(refusal(client), Draining), "no more is taken")
        for call in calls:
            call.result()
        assert running.process.wait(PATIENCE_S) == 0
        until(lambda: isinstance(refusal(client), PoolLost), "the pool is gone")


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

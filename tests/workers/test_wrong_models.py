"""The pool against models that go wrong, each told to misbehave: on a task, or before they have begun."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.workers.drivers import client_of, client_with, x
from tests.workers.pools import PoolProcess, alive, children, pool, send, until, wait_replicas, wait_state
from workers import (
    DeadlineExceeded,
    Future,
    InvalidInput,
    ModelFailed,
    NotReady,
    PoolError,
    Refused,
    State,
    ThreadClient,
    WorkerDied,
)
from workers.model import Array

GATHER: dict[str, object] = {"max_delay_ms": 200, "max_batch": 8}
"""With this, eight tasks submitted one after the other run as one batch."""
MODELS: dict[str, dict[str, object]] = {
    "poison": {"model": "Poison", **GATHER},
    "hang": {"model": "Hang", "timeout_s": 1.0},
    "exit0": {"model": "Exit0", **GATHER},
    "short": {"model": "Short", **GATHER},
    "wrongdtype": {"model": "WrongDtype"},
    "strided": {"model": "Strided", **GATHER},
    "unpicklable": {"model": "Unpicklable"},
    "raise": {"model": "Raise", **GATHER},
    "particular": {"model": "Particular", **GATHER},
    "scribble": {"model": "Scribble"},
    "children": {"model": "Children"},
    "echo": {"model": "Echo", **GATHER},
}


@pytest.fixture(scope="module")
def zoo() -> Iterator[PoolProcess]:
    with pool(MODELS) as running, client_with(running.socket_path, *MODELS):
        yield running


@pytest.fixture
def client(zoo: PoolProcess) -> Iterator[ThreadClient]:
    with client_with(zoo.socket_path, *MODELS) as it:
        yield it
    assert children(zoo.pid)


@pytest.fixture
def steady(zoo: PoolProcess, client: ThreadClient) -> Iterator[None]:
    """No worker dies."""
    before = {name: zoo.workers(name) for name in MODELS}
    yield
    assert {name: zoo.workers(name) for name in MODELS} == before
    assert client.predict("echo", {"x": x(1)})["y"] == 1


def fates(client: ThreadClient, model: str, inputs: list[Array]) -> list[object]:
    """What becomes of tasks that are submitted at once: the answer as lists, or the error."""
    futures = [client.submit(model, {"x": one}) for one in inputs]
    return [fate(future) for future in futures]


def fate(future: Future) -> object:
    try:
        return future.result()["y"].tolist()
    except PoolError as error:
        return error


# A model goes wrong on one task.


@pytest.mark.parametrize("codec", ["", "json-row"])
def test_poison_costs_only_itself(client: ThreadClient, zoo: PoolProcess, codec: str) -> None:
    client.predict("poison", {"x": x(0)})
    before = client.statuses()["poison"].restarts
    values = [1, 2, 3, 666, 5, 6, 7, 8]
    answers: list[object]
    if codec:
        futures = [client.submit_body("poison", json.dumps({"x": [v]}).encode(), codec) for v in values]
        answers = []
        for future in futures:
            try:
                answers.append([json.loads(future.body())["y"]])
            except PoolError as error:
                answers.append(error)
    else:
        answers = fates(client, "poison", [x(v) for v in values])
    assert isinstance(answers.pop(3), WorkerDied)
    assert answers == [[[v]] for v in values if v != 666]
    wait_replicas(client, "poison")
    until(lambda: client.statuses()["poison"].restarts == before + 2, "both deaths are counted")
    assert zoo.log().count("was killed by SIGSEGV") >= 2


@pytest.mark.parametrize("value", [667, 669])
def test_a_model_that_hangs_is_killed_at_its_time_limit(client: ThreadClient, zoo: PoolProcess, value: int) -> None:
    client.predict("hang", {"x": x(0)})
    before = zoo.worker("hang")
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.predict("hang", {"x": x(value)})
    assert 0.8 < time.monotonic() - began < 1.3
    until(lambda: not alive(before), "the worker that hangs is gone", 1)
    wait_replicas(client, "hang")
    assert client.predict("hang", {"x": x(1)}, deadline=time.monotonic() + 10)["y"] == 1


def test_a_model_that_leaves_with_status_0_has_died(client: ThreadClient) -> None:
    client.predict("exit0", {"x": x(0)})
    answers = fates(client, "exit0", [x(1), x(668), x(3)])
    assert isinstance(answers[1], WorkerDied)
    assert answers[::2] == [[[1]], [[3]]]


@pytest.mark.usefixtures("steady")
def test_system_exit_and_keyboard_interrupt_fail_their_task_alone(client: ThreadClient) -> None:
    answers = fates(client, "exit0", [x(1), x(670), x(671), x(4)])
    assert [type(answer) for answer in answers[1:3]] == [ModelFailed, ModelFailed]
    assert str(answers[2]) == "KeyboardInterrupt"
    assert answers[::3] == [[[1]], [[4]]]


@pytest.mark.usefixtures("steady")
def test_an_error_in_a_batch_is_that_of_its_task_alone(client: ThreadClient) -> None:
    values = [1, -1, 3, 4, -5, 6, 7, 8]
    answers = fates(client, "raise", [x(v) for v in values])
    for value, answer in zip(values, answers, strict=True):
        if value < 0:
            assert isinstance(answer, ModelFailed) and str(answer) == "below zero"
        else:
            assert answer == [[value]]


@pytest.mark.usefixtures("steady")
def test_refusals_and_complaints_of_a_model_keep_their_code(client: ThreadClient) -> None:
    good, refused, invalid, last = fates(client, "particular", [x(1), x(-1), x(-2), x(4)])
    assert (good, last) == ([[1]], [[4]])
    assert isinstance(refused, Refused) and refused.code == "NOT_THIS_ONE"
    assert isinstance(invalid, InvalidInput) and str(invalid) == "'x' must not be -2"


@pytest.mark.usefixtures("steady")
def test_a_row_too_few_fails_and_nobody_gets_a_neighbours_row(client: ThreadClient) -> None:
    answers = fates(client, "short", [x(v) for v in range(1, 9)])
    assert {str(answer) for answer in answers} == {"output 'y' has 0 rows for a batch of 1"}
    assert all(isinstance(answer, ModelFailed) for answer in answers)
    assert fates(client, "short", [x(0)] * 8) == [[[0]]] * 8


@pytest.mark.parametrize(
    ("model", "value", "text"),
    [
        ("wrongdtype", 1, "output 'y' is float64, declared float32"),
        ("unpicklable", -1, "needs a and b"),
        ("unpicklable", 1, "output 'y' is a function, not an array"),
        ("scribble", 1, "assignment destination is read-only"),
    ],
)
@pytest.mark.usefixtures("steady")
def test_a_wrong_answer_is_told_in_words(client: ThreadClient, model: str, value: int, text: str) -> None:
    with pytest.raises(ModelFailed) as raised:
        client.predict(model, {"x": x(value)})
    assert str(raised.value) == text


@pytest.mark.usefixtures("steady")
def test_outputs_with_odd_strides(client: ThreadClient) -> None:
    inputs = [np.arange(6, dtype=np.float32).reshape(1, 2, 3) + 10 * k for k in range(8)]
    for one, future in zip(inputs, [client.submit("strided", {"x": one}) for one in inputs], strict=True):
        answer = future.result()
        assert (answer["t"] == one.transpose(0, 2, 1)).all()
        assert (answer["r"] == one[:, :, ::-1]).all()
        assert (answer["c"] == one[0, 0, 0]).all() and answer["c"].shape == (1, 4)
        assert (answer["n"] == one).all()


@pytest.mark.usefixtures("steady")
def test_shapes_and_sizes_are_never_mixed_up_in_a_batch(client: ThreadClient) -> None:
    random = np.random.default_rng(7)
    inputs = [
        random.random((int(random.integers(1, 4)), int(random.choice([0, 1, 3, 500, 5000]))), np.float32)
        for _ in range(64)
    ]
    futures = [client.submit("echo", {"x": one}) for one in inputs]
    body = client.submit_body("echo", b'{"x":[7,8,9]}', "json-row")
    for one, future in zip(inputs, futures, strict=True):
        answer = future.result()["y"]
        assert answer.shape == one.shape and answer.tobytes() == one.tobytes()
    assert body.body() == b'{"y":[7.0,8.0,9.0]}'


@pytest.mark.usefixtures("steady")
def test_callers_mistakes_cost_no_worker(client: ThreadClient) -> None:
    wrong = [{}, {"x": np.ones((1, 1))}, {"x": np.ones(1, np.float32)}, {"x": x(1), "y": x(1)}]
    for inputs in wrong * 20:
        with pytest.raises(InvalidInput):
            client.predict("echo", inputs)
    for body in [b"", b"{}", b"[", b'{"x":1}', b'{"x":[NaN]}', b"\xff", b"[" * 5000]:
        with pytest.raises(InvalidInput):
            client.predict_body("echo", body, "json-row")


def test_what_a_model_has_started_ends_with_its_worker(client: ThreadClient, zoo: PoolProcess) -> None:
    child = int(client.predict("children", {"x": x(0)})["child"][0])
    assert alive(child)
    send(zoo.worker("children"), signal.SIGKILL)
    until(lambda: not alive(child), "the model's own process is gone", 2)
    wait_replicas(client, "children")


# Models that cannot begin.


def test_a_crash_loop_is_told_backed_off_and_left_when_the_cause_is_gone(tmp_path: Path) -> None:
    cure = tmp_path / "cure"
    models: dict[str, dict[str, object]] = {
        "crash": {"model": "CrashLoad", "options": {"unless": str(cure)}},
        "badload": {"model": "BadLoad"},
        "badwarmup": {"model": "BadWarmUp"},
        "refusing": {"model": "Refusing"},
        "late": {"model": "SlowLoad", "load_timeout_s": 0.5, "options": {"seconds": 100}},
        "echo": {"model": "Echo"},
    }
    with pool(models) as running, client_of(running.socket_path) as client:
        wait_state(client, State.READY, "echo")
        echo = running.worker("echo")
        began = time.monotonic()
        wait_state(client, State.CRASH_LOOPED, "crash", "badload", "badwarmup", "late")
        # At once, then after 1 and 2 seconds.
        assert time.monotonic() - began > 2
        reasons = {name: status.reason for name, status in client.statuses().items()}
        assert reasons["crash"] == "a worker exited with code 3 while it was loading"
        assert reasons["badload"] == "RuntimeError: the weights are not there"
        assert reasons["badwarmup"] == "RuntimeError: cold"
        assert reasons["late"] == "not loaded within 0.5 s"
        for name in ("crash", "badload", "badwarmup", "late"):
            assert client.statuses()[name].restarts == 4
            with pytest.raises(NotReady, match=re.escape(reasons[name])):
                client.predict(name, {"x": x(1)})
        assert client.statuses()["refusing"].state is State.REFUSED
        assert client.statuses()["refusing"].restarts == 0
        assert client.predict("echo", {"x": x(1)})["y"] == 1
        assert running.worker("echo") == echo
        cure.touch()
        wait_state(client, State.READY, "crash")
        assert client.predict("crash", {"x": x(1)})["y"] == 1
        assert client.statuses()["crash"].reason == ""

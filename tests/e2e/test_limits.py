"""Queues, deadlines, callers that leave, and models that fail, through HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.stack import (
    SCORE,
    ZOO,
    Response,
    Stack,
    ask,
    code_of,
    every_web_process,
    head,
    kill,
    place,
    service,
    threads,
)
from tests.service.serving import PATIENCE_S, Client, until

GOOD = b'{"features":[1,2,3,4]}'
SCORES = b'{"scores":[5.25,5.25]}'


WAIT, PASS = b'{"wait":1}', b'{"wait":0}'


@contextlib.contextmanager
def gated(web: int = 1, **table: object) -> Iterator[tuple[Stack, Path]]:
    """A service whose model `gate` runs one task at a time, and the file that lets go of a task that waits."""
    with place() as directory:
        gate = directory / "gate"
        model = {"model": "tests.e2e.models:Gate", "options": {"gate": str(gate)}, "max_batch": 1, **table}
        with service({"gate": model, "score": SCORE}, web=web, directory=directory) as stack:
            yield stack, gate


def slow_score(seconds: float, **table: object) -> dict[str, object]:
    return {"model": "tests.e2e.models:SlowScore", "options": {"seconds": seconds}, "max_batch": 1, **table}


def send(stack: Stack, model: str, body: bytes, under_way_then: int, path: str = "/predict/") -> Client:
    """A client that waits for its answer; its task is one of so many under way."""
    client = stack.connect()
    client.send(head(path + model, len(body)) + body)
    until(lambda: under_way(stack) == under_way_then, "the request is under way")
    return client


def under_way(stack: Stack) -> int:
    """Tasks without a final frame, of all web processes."""
    return sum(json.loads(body)["under_way"] for _, _, body in every_web_process(stack, "/slots").values())


# Full queues


def test_a_full_queue_is_429_before_the_body_has_come_and_exactly_as_many_as_fit_are_accepted() -> None:
    with gated(max_queue=8) as (stack, gate), contextlib.ExitStack() as open_connections:
        waiting = [send(stack, "gate", WAIT if n == 0 else PASS, n + 1) for n in range(1 + 8)]
        for client in waiting:
            open_connections.enter_context(client)
        slowest = 0.0
        for _ in range(20):
            with stack.connect() as client:
                began = time.monotonic()
                client.send(head("/predict/gate", 1000) + b'{"wait":')  # and no more than this of the body
                response = client.response()
                slowest = max(slowest, time.monotonic() - began)
            assert (response[0], code_of(response), response[1]["retry-after"]) == (429, "OVERLOADED", "1")
            assert time_of_health(stack) < 0.1
        assert slowest < 0.1
        # Other models have queues of their own.
        assert stack.post("/score", GOOD)[2] == SCORES
        gate.touch()
        assert [client.response()[::2] for client in waiting] == [(200, b'{"calls":%d}' % (n + 1)) for n in range(9)]
        assert stack.post("/predict/gate", PASS)[::2] == (200, b'{"calls":10}')
        assert under_way(stack) == 0


def test_a_full_queue_of_the_score_route_is_429_before_the_body_has_come() -> None:
    with service({"score": slow_score(1.5, max_queue=1)}, web=1) as stack:
        with send(stack, "score", GOOD, 1, "/") as first, send(stack, "score", GOOD, 2, "/") as second:
            with stack.connect() as client:
                client.send(head("/score", 30))
                response = client.response()
            assert (response[0], code_of(response), response[1]["retry-after"]) == (429, "OVERLOADED", "1")
            assert under_way(stack) == 2, "the refusal did not wait for an end"
            assert [client.response()[::2] for client in (first, second)] == [(200, b'{"scores":[10.0,4.0]}')] * 2
        assert stack.post("/score", GOOD)[0] == 200


def time_of_health(stack: Stack) -> float:
    began = time.monotonic()
    with stack.connect() as client:
        assert ask(client, "/health")[0] == 200
    return time.monotonic() - began


def test_a_burst_is_accepted_up_to_the_limit_and_refused_beyond() -> None:
    clients, limit, web = 60, 16, 2
    with gated(web=web, max_queue=limit) as (stack, gate), send(stack, "gate", WAIT, 1):
        statuses: list[int] = []
        together = threading.Barrier(clients)

        def burst(_: int, __: threading.Event) -> None:
            with stack.connect() as client:
                together.wait(PATIENCE_S)
                statuses.append(ask(client, "/predict/gate", PASS)[0])

        with threads(clients, burst):
            # Each web process may find the last place free at the same moment.
            until(lambda: len(statuses) >= clients - limit - (web - 1), "the others are refused")
            assert set(statuses) == {429}
            assert time_of_health(stack) < 0.1
            gate.touch()
        accepted = statuses.count(200)
        assert accepted + statuses.count(429) == clients
        assert limit <= accepted <= limit + (web - 1)
        until(lambda: under_way(stack) == 0, "all is answered")


# Deadlines


def test_a_deadline_is_504_at_its_time_though_the_model_is_busy() -> None:
    with service({"slow": {"model": ZOO + "Slow", "timeout_s": 1.0, "max_batch": 1}}, web=1) as stack:
        with send(stack, "slow", b'{"ms":700}', 1), send(stack, "slow", b'{"ms":700}', 2):
            began = time.monotonic()
            response = stack.predict("slow", ms=0)
            took = time.monotonic() - began
        assert (response[0], code_of(response)) == (504, "DEADLINE_EXCEEDED")
        assert 0.9 < took < 1.3
        until(lambda: under_way(stack) == 0, "nothing is under way")


def test_a_deadline_is_counted_from_the_head_however_slowly_the_body_comes() -> None:
    timeout_s = 2.0
    # Counted from the body's end, there would be time enough.
    with service({"score": slow_score(1.6, timeout_s=timeout_s)}, web=1) as stack, stack.connect() as client:
        began = time.monotonic()
        client.send(head("/score", len(GOOD)))
        for n in range(len(GOOD)):
            sent_at = began + timeout_s / 2 * (n + 1) / len(GOOD)
            time.sleep(max(0.0, sent_at - time.monotonic()))
            client.send(GOOD[n : n + 1])
        response = client.response()
        took = time.monotonic() - began
        assert (response[0], code_of(response)) == (504, "DEADLINE_EXCEEDED")
        assert abs(took - timeout_s) < 0.4
        until(lambda: under_way(stack) == 0, "nothing is under way")
        assert stack.post("/score", GOOD)[0] == 200


def test_a_hanging_model_is_504_and_its_worker_replaced() -> None:
    with service({"hang": {"model": ZOO + "Hang", "timeout_s": 1.0}, "score": SCORE}, web=1) as stack:
        before = stack.compute("hang")
        for value in (667, 669):
            began = time.monotonic()
            response = stack.predict("hang", x=[value])
            assert (response[0], code_of(response)) == (504, "DEADLINE_EXCEEDED")
            assert time.monotonic() - began < 1.5
            assert stack.post("/score", GOOD)[2] == SCORES
            until(lambda: stack.predict("hang", x=[1.0])[0] == 200, "the next one works")
        assert not set(before) & set(stack.compute("hang"))


# Callers that leave


def test_what_nobody_waits_for_any_more_is_not_run() -> None:
    with gated() as (stack, gate), send(stack, "gate", WAIT, 1) as first:
        leaving = [send(stack, "gate", PASS, n + 2) for n in range(20)]
        for client in leaving:
            client.socket.close()
        until(lambda: stack.log().count(" -> 499 ") == 20, "the service has seen them leave")
        gate.touch()
        assert first.response()[2] == b'{"calls":1}'
        assert stack.post("/predict/gate", PASS)[2] == b'{"calls":2}'
        assert under_way(stack) == 0


def test_a_reset_is_a_caller_that_left() -> None:
    with gated() as (stack, gate):
        client = send(stack, "gate", WAIT, 1)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()  # by a reset
        until(lambda: " -> 499 " in stack.log(), "the service has seen it")
        gate.touch()
        until(lambda: under_way(stack) == 0, "its slot is free")
        assert "Traceback" not in stack.log()


# Whose answer is whose


def test_the_same_request_id_fifty_times_gets_fifty_right_answers() -> None:
    with service({"tag": {"model": ZOO + "DelayedTag", "replicas": 2}}) as stack:
        right: list[int] = []

        def run(number: int, _: threading.Event) -> None:
            body = json.dumps({"nonce": number, "ms": number % 7}).encode()
            with stack.connect() as client:
                status, headers, answer = ask(client, "/predict/tag", body, "X-Request-ID: the-same")
            if (status, json.loads(answer), headers["x-request-id"]) == (200, {"nonce": number}, "the-same"):
                right.append(number)

        with threads(50, run):
            pass
        assert sorted(right) == list(range(50))


# Models that fail


def test_poison_among_good_ones_costs_only_itself() -> None:
    with service({"poison": {"model": ZOO + "Poison", "replicas": 2}}) as stack:
        answers: dict[int, Response] = {}

        def run(number: int, _: threading.Event) -> None:
            answers[number] = stack.predict("poison", x=[666.0 if number % 10 == 0 else float(number)])

        with threads(40, run):
            pass
        for number, response in answers.items():
            if number % 10:
                assert (number, response[0], json.loads(response[2])) == (number, 200, {"y": [float(number)]})
            else:
                assert (number, response[0], code_of(response)) == (number, 500, "WORKER_DIED")
        stack.wait_ready()
        until(lambda: len(stack.compute()) == 2, "both workers are back")
        assert stack.predict("poison", x=[1.0])[0] == 200


def test_a_model_that_exits_or_raises_is_an_error_of_that_request_alone() -> None:
    models = {"exit0": {"model": ZOO + "Exit0"}, "raise": {"model": ZOO + "Raise"}, "short": {"model": ZOO + "Short"}}
    with service(models, web=1) as stack:
        for model, value, code in (
            ("exit0", 668, "WORKER_DIED"),
            ("exit0", 670, "MODEL_FAILED"),
            ("exit0", 671, "MODEL_FAILED"),
            ("raise", -1, "MODEL_FAILED"),
            ("short", 5, "MODEL_FAILED"),
        ):
            response = stack.predict(model, x=[value])
            assert (model, value, response[0], code_of(response)) == (model, value, 500, code)
            assert b"Traceback" not in response[2]
            until(lambda model=model: stack.predict(model, x=[0])[0] == 200, "the next one works")  # type: ignore[misc]


def test_a_refusing_model_is_403_and_the_rest_is_ready() -> None:
    with service({"refusing": {"model": ZOO + "Refusing"}, "score": SCORE}, web=1, ready=False) as stack:
        stack.wait_ready()
        until(lambda: b'"refused"' in status_of(stack)[2], "the refusal is known")
        response = stack.predict("refusing", x=[1])
        assert (response[0], code_of(response)) == (403, "LICENSE_FAILED")
        assert json.loads(response[2])["error"] == "a licence is needed"
        status, _, body = status_of(stack)
        assert status == 200
        refused = {"state": "refused", "reason": "a licence is needed", "code": "LICENSE_FAILED"}
        assert json.loads(body)["models"] == {"refusing": refused, "score": {"state": "ready", "reason": ""}}
        assert stack.post("/score", GOOD)[2] == SCORES


def status_of(stack: Stack) -> Response:
    with stack.connect() as client:
        return ask(client, "/ready")


def test_nan_in_an_answer_is_422_whatever_decodes_the_body() -> None:
    with service({"nan": {"model": ZOO + "Nan"}}, web=1) as stack:
        for padding in (b"", b" " * 100_000):
            for value in (b"0", b"1"):
                response = stack.post("/predict/nan", b'{"x":[%b]}' % value + padding)
                assert (response[0], code_of(response)) == (422, "INVALID_OUTPUT")


def test_a_slow_load_keeps_only_readiness_waiting() -> None:
    models = {"late": {"model": ZOO + "SlowLoad", "options": {"seconds": 3.0}}, "score": SCORE}
    with service(models, "--timeout", "2", ready=False) as stack:
        began = time.monotonic()
        web = set(stack.web())
        until(lambda: stack.post("/score", GOOD)[0] == 200, "the other model serves")
        with stack.connect() as client:
            assert ask(client, "/health")[0] == 200
            status, _, body = ask(client, "/ready")
        assert (status, json.loads(body)["models"]["late"]["state"]) == (503, "loading")
        response = stack.predict("late", x=[1])
        assert (response[0], code_of(response)) == (503, "NOT_READY")
        assert time.monotonic() - began < 2.5
        stack.wait_ready()
        assert stack.predict("late", x=[1])[0] == 200
        until(lambda: set(stack.web()) >= web and len(stack.web()) == 2, "the web processes are what they were")
        assert not re.search("timeout|Traceback", stack.log(), re.IGNORECASE)


def test_a_model_that_cannot_load_is_told_with_its_reason_and_the_rest_serves() -> None:
    models = {"bad": {"model": ZOO + "BadLoad"}, "cold": {"model": ZOO + "BadWarmUp"}, "score": SCORE}
    with service(models, web=1, ready=False) as stack:
        until(lambda: b"the weights are not there" in status_of(stack)[2], "the reason")
        until(lambda: b"RuntimeError: cold" in status_of(stack)[2], "the other reason")
        until(lambda: stack.post("/score", GOOD)[2] == SCORES, "the rest serves")
        assert status_of(stack)[0] == 503
        assert stack.predict("bad", x=[1])[0] == 503


def test_a_killed_worker_of_one_replica_keeps_its_queue() -> None:
    with gated() as (stack, gate), send(stack, "gate", WAIT, 1) as running, send(stack, "gate", PASS, 2) as waiting:
        (worker,) = stack.compute("gate")
        kill(worker)
        gate.touch()
        assert (running.response()[0], waiting.response()[0]) == (200, 200)
        assert stack.compute("gate") != [worker]

"""Streams from compute processes to clients: whole, bounded, cancelled at once, ended in good order."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import time
from statistics import quantiles

import pytest

from service.sse import TOKENS
from tests.bench.listeners import leave
from tests.e2e.clients import TAG, tagging
from tests.e2e.many_streams import Watched, read_all
from tests.e2e.stack import BUILT_IN, ZOO, Stack, ask, every_web_process, fds, head, kill, service
from tests.lengths import STORM_S
from tests.service.serving import until
from tests.service.sse_client import StreamClient

TICKS: dict[str, object] = {"model": "tests.e2e.models:Ticks", "options": {"ms": 5.0}}
SLOW: dict[str, object] = {"model": ZOO + "Slow", "replicas": 2, "timeout_s": 20.0}
ROOMY: dict[str, object] = {"slots": [[4096, 2048], [65536, 8]]}
WAYS = ("/ticks", "/flask/ticks")
CONTRACT = b"".join(TOKENS.frame(piece) for piece in ("Tensors ", "stream ", "one ", "by ", "one."))
STOPPING = b'event: error\ndata: {"error":"the server is stopping","code":"DRAINING"}\n\n'

_nonces = itertools.count(1)


def said(nonce: int, count: int, pad: int = 0) -> bytes:
    return b"".join(TOKENS.frame(f"{nonce}.{number}{'x' * pad} ") for number in range(1, count + 1))


def path(way: str, nonce: int, **told: int) -> str:
    return f"{way}?nonce={nonce}" + "".join(f"&{name}={value}" for name, value in told.items())


def told(stack: Stack) -> tuple[int, int]:
    """How many streams are live in compute, and how many pieces have been made."""
    answer = json.loads(stack.predict("ticks", nonce=0, count=0, silent=0, pad=0, fails=0)[2])
    return answer["live"], answer["made"]


def nothing_left(stack: Stack) -> bool:
    """Nothing is computed, and no slot is out, for anybody."""
    if told(stack)[0]:
        return False
    return all(
        json.loads(body) == {"leased": 0, "under_way": 0} for _, _, body in every_web_process(stack, "/slots").values()
    )


def until_nothing_left(stack: Stack, seconds: float = 2.0) -> None:
    until(lambda: nothing_left(stack), "no stream is live and every slot is free", seconds)


def error(text: str, code: str) -> bytes:
    return b'event: error\ndata: {"error":"%b","code":"%b"}\n\n' % (text.encode(), code.encode())


# What arrives


def test_the_contract_is_kept_by_the_real_pool() -> None:
    with service(app=BUILT_IN, web=1) as stack:
        for route, version in itertools.product(("/generate", "/events"), ("HTTP/1.1", "HTTP/1.0")):
            with StreamClient(stack.port, route, "Connection: close", version=version) as client:
                assert client.finish() == CONTRACT
                assert (client.status, client.whole) == (200, True)
            with StreamClient(stack.port, route, "Connection: close", version=version, method="HEAD") as client:
                assert (client.status, client.finish()) == (200, b"")


def test_every_stream_of_many_is_whole_and_its_own() -> None:
    with service({"ticks": TICKS, "tag": TAG}, arena=ROOMY) as stack, contextlib.ExitStack() as ends:
        with tagging(stack, 4):
            clients = {}
            for _ in range(500):
                nonce = next(_nonces)
                way = WAYS[nonce % 2]
                clients[nonce] = ends.enter_context(
                    Watched(stack.port, path(way, nonce, count=30), "Connection: close")
                )
            read_all(clients.values(), 30)
        for nonce, client in clients.items():
            assert client.body == said(nonce, 30)
            assert client.whole
        until_nothing_left(stack)
        assert "Traceback" not in stack.log()


def test_more_streams_than_a_process_takes_wait_for_their_turn() -> None:
    with service({"ticks": {**TICKS, "replicas": 2, "max_streams": 4}}, web=1) as stack, contextlib.ExitStack() as ends:
        clients = {
            nonce: ends.enter_context(Watched(stack.port, path("/ticks", nonce, count=10), "Connection: close"))
            for nonce in range(1, 41)
        }
        read_all(clients.values(), 20)
        assert [client.body for client in clients.values()] == [said(nonce, 10) for nonce in clients]


@pytest.mark.parametrize("flags", [("-k", "gevent"), ("-k", "gthread", "--threads", "4"), ("-k", "sync")])
def test_any_worker_of_gunicorns_streams_from_the_pool(flags: tuple[str, ...]) -> None:
    with service({"ticks": TICKS}, *flags, web=1) as stack:
        with StreamClient(stack.port, path("/ticks", 3, count=20), "Connection: close") as client:
            assert client.finish() == said(3, 20)
            assert client.whole
        with StreamClient(stack.port, path("/ticks", 4, silent=5, fails=4), "Connection: close") as client:
            assert client.finish().startswith(said(4, 3) + b"event: error\n")
        if "sync" not in flags:  # it has nobody left to ask for how much is live
            with StreamClient(stack.port, path("/ticks", 5, silent=10_000)):
                until(lambda: told(stack)[0] == 1, "it is live")
            until(lambda: told(stack)[0] == 0, "nothing is computed for a client that has left", 2)
            with StreamClient(stack.port, path("/ticks", 6)) as client:
                client.until(b"data: 6.3 \n\n")
            until(lambda: "-> 200 aborted" in stack.log(), "its line")
            assert "Traceback" not in stack.log()


# What fails


def test_a_stream_that_is_cut_short_says_why_and_the_others_go_on() -> None:
    models = {"ticks": {**TICKS, "stream_timeout_s": 1.0}}
    with service(models, web=1) as stack:
        with StreamClient(stack.port, path("/ticks", 1)) as endless:
            with StreamClient(stack.port, path("/ticks", 2, fails=3), "Connection: close") as failing:
                body = failing.finish()
                assert body.startswith(said(2, 2) + b"event: error\n")
                assert json.loads(body.splitlines()[-2].removeprefix(b"data: "))["code"] == "MODEL_FAILED"
                assert failing.whole
            with StreamClient(stack.port, path("/ticks", 3, fails=1), "Connection: close") as failing:
                assert failing.status == 500
                assert json.loads(failing.finish())["code"] == "MODEL_FAILED"
            body = endless.finish()
            assert endless.whole
            assert body.count(b"event: token\n") > 50
            assert json.loads(body.splitlines()[-2].removeprefix(b"data: "))["code"] == "DEADLINE_EXCEEDED"
        until_nothing_left(stack)


def test_a_worker_that_dies_ends_its_streams_with_a_word_and_no_others() -> None:
    with service({"ticks": TICKS}, web=1) as stack:
        with StreamClient(stack.port, path("/ticks", 1)) as client:
            client.until(b"data: 1.5 \n\n")
            (worker,) = stack.compute("ticks")
            kill(worker)
            began = time.monotonic()
            body = client.finish()
            assert time.monotonic() - began < 1
            assert client.whole
            assert json.loads(body.splitlines()[-2].removeprefix(b"data: "))["code"] == "WORKER_DIED"
        with StreamClient(stack.port, path("/ticks", 2, count=5), "Connection: close") as client:
            assert client.finish() == said(2, 5)
        until_nothing_left(stack, 10)


def test_a_web_process_that_dies_takes_its_streams_with_it() -> None:
    with service({"ticks": TICKS}, web=1) as stack:
        with StreamClient(stack.port, path("/ticks", 1)) as client:
            client.until(b"data: 1.5 \n\n")
            (web,) = stack.web()
            kill(web)
            client.finish()
            assert not client.whole
        until(lambda: stack.web() not in ([], [web]) and stack.all_ready(), "there is another")
        until_nothing_left(stack)


# Clients that leave


def leave_by_close(client: StreamClient) -> None:
    client.socket.close()


def leave_by_reset(client: StreamClient) -> None:
    client.reset()


def leave_by_half(client: StreamClient) -> None:
    client.socket.shutdown(socket.SHUT_WR)
    client.finish()


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_reset, leave_by_half])
def test_nothing_is_computed_for_a_client_that_has_left(leave: object) -> None:
    assert callable(leave)
    with service({"ticks": TICKS}, web=1) as stack:
        for way in WAYS:
            for silent in (0, 10_000):  # in the middle of its pieces, and idle before the first one
                with StreamClient(stack.port, path(way, 1, silent=silent)) as client:
                    if not silent:
                        client.until(b"data: 1.3 \n\n")
                    until(lambda: told(stack)[0] == 1, "it is live")
                    leave(client)
                    until_nothing_left(stack)
                made = told(stack)[1]
                assert stack.predict("ticks", nonce=0, count=0, silent=0, pad=0, fails=0)[0] == 200
                assert told(stack)[1] == made
        assert "Traceback" not in stack.log()


def test_clients_that_leave_at_any_moment_leave_nothing() -> None:
    with service({"ticks": TICKS, "tag": {**TAG, "replicas": 1}}, web=1, arena=ROOMY) as stack:
        processes = [*stack.web(), *stack.compute(), stack.pool()]

        def held() -> list[tuple[int, int]]:
            """Descriptors and threads."""
            return [(fds(pid), len(os.listdir(f"/proc/{pid}/task"))) for pid in processes]

        with StreamClient(stack.port, path("/ticks", 1)) as client, tagging(stack, 1) as clients:
            client.until(b"data: 1.3 \n\n")
            until(lambda: clients.right > 10, "every process has met its client")
        until_nothing_left(stack)
        before = held()
        with tagging(stack, 2):
            assert leave(stack.port, path("/ticks", 2), 500, STORM_S) > 400 * STORM_S
        until_nothing_left(stack)
        until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "no more is held than before")
        assert "Traceback" not in stack.log()


# Clients that do not read


def test_clients_that_never_read_bound_what_is_made_and_disturb_nobody() -> None:
    env = {"HEADRACE_SEND_TIMEOUT": "2.0"}
    with service({"ticks": TICKS, "tag": TAG}, web=1, env=env) as stack, contextlib.ExitStack() as ends:
        with Watched(stack.port, path("/ticks", 1)) as reader, tagging(stack, 2):
            reader.until(b"data: 1.10 \n\n")
            for number in range(20):
                ends.enter_context(
                    StreamClient(stack.port, path(WAYS[number % 2], 1000 + number, pad=1000), window=4096)
                )
            until(lambda: told(stack)[0] == 21, "all are live")
            began = time.monotonic()
            read_all([reader], 20, until=lambda: time.monotonic() - began > 1.5)
            live, made = told(stack)
            assert live == 21  # they have their time
            mine = reader.body.count(b"event: token\n")
            # A window of 16 KiB in each of: what the pool sends ahead, this process, the kernel's two buffers.
            assert made - mine < 20 * 100, "a client that does not read is computed for without end"
            until(lambda: told(stack)[0] == 1, "they have lost their streams", 5)
            read_all([reader], 20, until=lambda: time.monotonic() - began > 4)
            gaps = [after - before for before, after in itertools.pairwise(reader.times)]
            assert quantiles(gaps, n=100)[98] < 0.2, quantiles(gaps, n=100)[90:]
        until_nothing_left(stack)
        assert "Traceback" not in stack.log()


def test_a_client_that_reads_slowly_gets_every_piece() -> None:
    with service({"ticks": {**TICKS, "options": {"ms": 0.5}}}, web=1) as stack:
        for way in WAYS:
            with StreamClient(stack.port, path(way, 5, count=400, pad=500), "Connection: close", window=4096) as client:
                for _ in range(5):
                    time.sleep(0.1)  # it is behind, and stays so
                    client.until(b"data: ")
                assert client.finish() == said(5, 400, 500)
                assert client.whole
        until_nothing_left(stack)


# Silence, and how many


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_stream_has_heartbeats(way: str) -> None:
    with service({"ticks": TICKS}, web=1, env={"HEADRACE_HEARTBEAT": "0.5"}) as stack:
        with StreamClient(stack.port, path(way, 1, count=2, fails=0)) as client:
            client.finish()
            assert b": ping" not in client.body
        with StreamClient(stack.port, path(way, 1), "Connection: close") as client:
            client.until(b"data: 1.3 \n\n")
            (worker,) = stack.compute("ticks")
            kill(worker, signal.SIGSTOP)
            try:
                client.until(b": ping\n\n: ping\n\n")
            finally:
                kill(worker, signal.SIGCONT)
            client.until(b": ping\n\nevent: token\n")


def test_streams_leave_room_for_health_and_scores() -> None:
    with (
        service({"ticks": TICKS, "tag": TAG}, "--worker-connections", "50", web=1) as stack,
        contextlib.ExitStack() as ends,
    ):
        clients = [ends.enter_context(Watched(stack.port, path("/ticks", number))) for number in range(40)]
        for client in clients:
            client.until(b"event: token\n")
        with StreamClient(stack.port, path("/ticks", 41)) as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert json.loads(refused.finish())["code"] == "OVERLOADED"
        for _ in range(10):
            began = time.monotonic()
            with stack.connect() as client:
                assert ask(client, "/health")[0] == 200
            assert time.monotonic() - began < 0.5
        assert stack.predict("tag", nonce=1)[0] == 200
        for client in clients:
            client.socket.close()
        until_nothing_left(stack)


# The end


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_ends_streams_in_good_order_and_finishes_scores(sig: signal.Signals) -> None:
    models = {"ticks": TICKS, "slow": SLOW}
    with service(models, "--graceful-timeout", "5") as stack, contextlib.ExitStack() as ends:
        endless = [ends.enter_context(Watched(stack.port, path(WAYS[n % 2], n))) for n in range(1, 7)]
        short = ends.enter_context(Watched(stack.port, path("/ticks", 100, count=200)))
        for client in (*endless, short):
            client.until(b"event: token\n")
        scores = [ends.enter_context(stack.connect()) for _ in range(4)]
        for score in scores:
            score.send(head("/predict/slow", 11) + b'{"ms":1000}')
        until(lambda: _under_way(stack) == 11, "all are under way")
        began = time.monotonic()
        stack.signal(sig)
        read_all([*endless, short], 10)
        assert short.body == said(100, 200)
        for client in endless:
            assert client.whole
            assert client.body.endswith(STOPPING)
            assert client.body.count(b"event: error") == 1
        for score in scores:
            assert score.response()[::2] == (200, b'{"ms":1000.0}')
        assert stack.wait() == 0
        assert time.monotonic() - began < 5 + 2
        stack.assert_nothing_left()
        assert "Traceback" not in stack.log()


def _under_way(stack: Stack) -> int:
    return sum(json.loads(body)["under_way"] for _, _, body in every_web_process(stack, "/slots").values())


def test_hup_ends_the_streams_of_the_old_processes_and_loads_no_model_again() -> None:
    with service({"ticks": TICKS, "tag": TAG}, "--graceful-timeout", "4") as stack, contextlib.ExitStack() as ends:
        kept = sorted([stack.pool(), *stack.compute()])
        with tagging(stack, 4):
            for _ in range(2):
                clients = [ends.enter_context(Watched(stack.port, path(WAYS[n % 2], n))) for n in range(1, 7)]
                for client in clients:
                    client.until(b"event: token\n")
                old = set(stack.web())
                stack.signal(signal.SIGHUP)
                read_all(clients, 15)
                for client in clients:
                    assert client.whole
                    assert client.body.endswith(STOPPING)
                until(lambda old=old: len(stack.web()) == 2 and not old & set(stack.web()), "new ones")  # type: ignore[misc]
                with StreamClient(stack.port, path("/ticks", 9, count=3), "Connection: close") as client:
                    assert client.finish() == said(9, 3)
        assert sorted([stack.pool(), *stack.compute()]) == kept
        until_nothing_left(stack)


def test_a_web_process_that_has_had_its_share_ends_its_streams() -> None:
    with service({"ticks": TICKS}, "--graceful-timeout", "4", "--max-requests", "60", web=1) as stack:
        with StreamClient(stack.port, path("/ticks", 1)) as client:
            client.until(b"event: token\n")
            (old,) = stack.web()
            for _ in range(70):
                with contextlib.suppress(OSError), stack.connect() as other:
                    ask(other, "/health")
            client.finish()
            assert client.whole
            assert client.body.endswith(STOPPING)
        until(lambda: stack.web() not in ([], [old]) and stack.all_ready(), "there is another")
        until_nothing_left(stack)


def test_each_stream_has_one_line_in_the_log() -> None:
    with service({"ticks": TICKS}, web=1) as stack:
        for number, way in enumerate(WAYS):
            with StreamClient(stack.port, path(way, 1, count=3), f"X-Request-ID: whole{number}") as client:
                client.until(b"data: 1.3 \n\n")
            with StreamClient(stack.port, path(way, 1), f"X-Request-ID: left{number}") as client:
                client.until(b"data: 1.3 \n\n")
            until(lambda number=number: f"left{number}" in stack.log(), "the second line")  # type: ignore[misc]
            lines = [line for line in stack.log().splitlines() if re.search(rf" (whole|left){number}$", line)]
            assert len(lines) == 2
            assert re.search(rf"GET {way} -> 200 [0-9.]+ ms whole{number}$", lines[0])
            assert re.search(rf"GET {way} -> 200 aborted [0-9.]+ ms left{number}$", lines[1])

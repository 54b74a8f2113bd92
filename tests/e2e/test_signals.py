"""Signals to stop, to reload, to freeze, at any moment, under load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time

import pytest

from tests.e2e.clients import TAG, Clients, tagging
from tests.e2e.stack import (
    APP,
    ZOO,
    Stack,
    alive,
    ask,
    code_of,
    end_all,
    environment,
    every_web_process,
    head,
    kill,
    place,
    service,
    threads,
    titles,
)
from tests.lengths import FROZEN_S
from tests.service.serving import PATIENCE_S, Client, start, until

SLOW: dict[str, object] = {"model": ZOO + "Slow", "replicas": 2, "timeout_s": 20.0}


def refused(port: int) -> bool:
    try:
        Client(port).socket.close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def under_way(stack: Stack) -> int:
    return sum(json.loads(body)["under_way"] for _, _, body in every_web_process(stack, "/slots").values())


# The end


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_under_load_finishes_what_was_accepted_and_leaves_nothing(sig: signal.Signals) -> None:
    with service({"slow": SLOW, "tag": TAG}) as stack, tagging(stack) as clients:
        until(lambda: clients.right > 100, "load")
        with stack.connect() as one, stack.connect() as two:
            for client in (one, two):
                client.send(head("/predict/slow", 10) + b'{"ms":700}')
            clients.stopping = True
            stack.signal(sig)
            assert stack.wait() == 0
            for client in (one, two):
                status, headers, body = client.response()
                assert (status, headers["connection"], body) == (200, "close", b'{"ms":700.0}')
        stack.assert_nothing_left()
        assert "Traceback" not in stack.log()


def test_a_second_signal_is_quick_and_leaves_nothing() -> None:
    for sig in (signal.SIGTERM, signal.SIGINT):
        with service({"slow": SLOW}) as stack, stack.connect() as busy:
            busy.send(head("/predict/slow", 12) + b'{"ms":15000}')
            until(lambda: under_way(stack) == 1, "it runs")
            stack.signal(sig)
            until(lambda: refused(stack.port), "the end has begun")
            began = time.monotonic()

            def ends(stack: Stack = stack, sig: signal.Signals = sig) -> bool:
                stack.signal(sig)
                return stack.process.poll() is not None

            until(ends, "it hurries", 3)
            assert stack.wait() == 0
            assert time.monotonic() - began < 3
            stack.assert_nothing_left()


def test_a_signal_at_any_moment_of_a_start_leaves_nothing() -> None:
    models = {"late": {"model": ZOO + "SlowLoad", "options": {"seconds": 2.0}}, "tag": TAG}
    for delay in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 0.9):
        for sig in (signal.SIGTERM, signal.SIGINT):
            with place() as directory, tempfile.TemporaryFile() as stderr:
                environ = environment(directory, models)
                with start(APP, workers=2, env=environ, cwd=directory, stderr=stderr) as process:
                    time.sleep(delay)  # the moment is what varies: before it listens, while it forks, while it loads
                    process.send_signal(sig)
                    try:
                        code = process.wait(PATIENCE_S)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        raise AssertionError((sig, delay, os.pread(stderr.fileno(), 9999, 0))) from None
                # Before Python has set anything up, the signal's own default ends it.
                assert code in (0, -sig, 1, 130), (delay, os.pread(stderr.fileno(), 9999, 0))
                until(lambda d=directory: not titles(d), f"all gone after {delay} s", 5)  # type: ignore[misc]
                assert list((directory / "run").iterdir()) == [], delay


def test_ctrl_c_reaches_the_whole_group_and_everything_ends_in_order() -> None:
    with service({"slow": SLOW}, group=True) as stack, stack.connect() as busy:
        group = os.getpgid(stack.master)
        assert {os.getpgid(pid) for pid in stack.web()} == {group}
        assert group not in {os.getpgid(pid) for pid in [stack.pool(), *stack.compute()]}
        busy.send(head("/predict/slow", 11) + b'{"ms":1000}')
        until(lambda: under_way(stack) == 1, "it runs")
        os.killpg(group, signal.SIGINT)
        assert busy.response()[::2] == (200, b'{"ms":1000.0}')
        assert stack.wait() == 0
        stack.assert_nothing_left()
        assert "Traceback" not in stack.log()


def test_workers_and_the_pool_are_not_ended_by_signals_of_a_terminal() -> None:
    with service({"tag": TAG}) as stack:
        before = stack.compute()
        for pid in before:
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                kill(pid, sig)
        kill(stack.pool(), signal.SIGHUP)
        assert stack.predict("tag", nonce=1)[0] == 200
        assert stack.compute() == before


# Reloading


def test_hup_under_load_fails_no_request_and_keeps_the_compute_processes() -> None:
    with service({"tag": TAG}) as stack:
        kept = [stack.pool(), *stack.compute()]
        with tagging(stack) as clients:
            for _ in range(3):
                old, answered = set(stack.web()), clients.right
                stack.signal(signal.SIGHUP)
                until(lambda old=old: len(stack.web()) == 2 and not old & set(stack.web()), "new web processes")  # type: ignore[misc]
                until(lambda answered=answered: clients.right > answered + 50, "answers go on")  # type: ignore[misc]
        assert [stack.pool(), *stack.compute()] == kept
        assert "Traceback" not in stack.log()


@pytest.mark.parametrize("broken", ["application", "configuration"])
def test_a_hup_that_cannot_work_leaves_the_service_as_it_was_and_says_so_once(broken: str) -> None:
    with place() as directory:
        application, configuration = directory / "probe.py", directory / "conf.py"
        good_application = "from tests.e2e.apps import server\n"
        good_configuration = "from service.gunicorn_conf import *\n"
        application.write_text(good_application)
        configuration.write_text(good_configuration)
        flags = ("-c", str(configuration))
        with service({"tag": TAG}, *flags, app="probe:server", directory=directory) as stack:
            before = stack.titles()
            with tagging(stack) as clients:
                if broken == "application":
                    application.write_text("def (\n")
                else:
                    configuration.write_text("workers = 'many'\n")
                stack.signal(signal.SIGHUP)
                until(lambda: "Reload refused" in stack.log(), "the refusal")
                answered = clients.right
                until(lambda: clients.right > answered + 50, "answers go on")
                assert stack.log().count("Reload refused") == 1
                assert stack.titles() == before
                application.write_text(good_application)
                configuration.write_text(good_configuration)
                stack.signal(signal.SIGHUP)
                old = {pid for pid, title in before.items() if title.startswith("gunicorn: worker")}
                until(lambda: len(stack.web()) == 2 and not old & set(stack.web()), "the next one works")


def test_max_requests_under_load_resets_nobody() -> None:
    with service({"tag": TAG}, "--max-requests", "150", "--max-requests-jitter", "50") as stack:
        seen = set(stack.web())
        with tagging(stack) as clients:

            def several_have_come_and_gone() -> bool:
                seen.update(stack.web())
                return len(seen) >= 8

            until(several_have_come_and_gone, "several web processes have come and gone", 60)
            assert clients.right > 500


# Frozen processes


def test_a_frozen_web_process_does_not_keep_the_others_from_serving() -> None:
    with service({"tag": TAG}, "--timeout", "3") as stack:
        frozen, other = stack.web()
        kill(frozen, signal.SIGSTOP)
        answers = 0

        def run(_: int, done: threading.Event) -> None:
            nonlocal answers
            # A connection that the frozen one had taken is its own, so each request comes on a new one.
            while not done.is_set():
                with stack.connect() as client:
                    client.socket.settimeout(0.5)
                    try:
                        right = ask(client, "/predict/tag", b'{"nonce":1}')
                    except OSError:
                        continue
                    assert right[0] == 200
                    assert int(right[1]["x-pid"]) != frozen
                    answers += 1

        with threads(2, run):
            until(lambda: answers > 100, "the other one serves")
            until(lambda: not alive(frozen) and len(stack.web()) == 2, "it is replaced")
        assert other in stack.web()
        # The slots it held went with it, and the pool has not noticed anything else.
        assert len(stack.compute()) == 2


def test_idle_workers_that_are_frozen_are_replaced_and_never_answer_later() -> None:
    with service({"tag": {**TAG, "timeout_s": 3.0}}) as stack:
        frozen = stack.compute()
        for pid in frozen:
            kill(pid, signal.SIGSTOP)
        # A stopped worker is noticed by what it leaves undone; as soon as one has been replaced, that serves all.
        with threads(4, lambda n, done: answered_or_expired(stack, n)):
            until(lambda: set(stack.compute()) - set(frozen) != set(), "one is replaced")
        for pid in frozen:
            kill(pid, signal.SIGCONT)
        with tagging(stack) as clients:
            until(lambda: clients.right > 200, "all serve")
        until(lambda: len(stack.compute()) == 2, "both are there")


def test_a_worker_frozen_in_the_middle_of_a_task_is_504_and_replaced() -> None:
    with service({"slow": {**SLOW, "replicas": 1, "timeout_s": 1.5}}) as stack, stack.connect() as waiting:
        (frozen,) = stack.compute()
        waiting.send(head("/predict/slow", 10) + b'{"ms":500}')
        until(lambda: under_way(stack) == 1, "it runs")
        kill(frozen, signal.SIGSTOP)
        began = time.monotonic()
        response = waiting.response()
        assert (response[0], code_of(response)) == (504, "DEADLINE_EXCEEDED")
        assert time.monotonic() - began < 2.0
        until(lambda: stack.compute() not in ([], [frozen]), "it is replaced", 3)
        kill(frozen, signal.SIGCONT)
        assert stack.predict("slow", ms=1)[::2] == (200, b'{"ms":1.0}')


def answered_or_expired(stack: Stack, nonce: int) -> None:
    status, _, body = response = stack.predict("tag", nonce=nonce)
    assert (
        body == b'{"nonce":%d}' % nonce if status == 200 else (status, code_of(response)) == (504, "DEADLINE_EXCEEDED")
    )


def test_a_pool_that_was_frozen_kills_nobody_when_it_goes_on() -> None:
    with service({"tag": {**TAG, "timeout_s": 2.0}}) as stack:
        before, pool = stack.compute(), stack.pool()
        with tagging(stack) as clients:
            # Every worker has met every web process: they are introduced by the pool.
            until(lambda: clients.right > 500, "load")
            kill(pool, signal.SIGSTOP)
            until_then = time.monotonic() + FROZEN_S
            # Requests do not pass the pool: they are answered as ever.
            while time.monotonic() < until_then:
                answered = clients.right
                until(lambda answered=answered: clients.right > answered + 20, "answers go on")  # type: ignore[misc]
                with stack.connect() as client:
                    assert ask(client, "/health")[0] == 200
            kill(pool, signal.SIGCONT)
            answered = clients.right
            until(lambda: clients.right > answered + 200, "answers go on")
        assert (stack.compute(), stack.pool()) == (before, pool)
        assert "killed" not in stack.log()


def test_a_frozen_pool_is_found_by_a_stop_all_the_same() -> None:
    with service({"tag": TAG}) as stack:
        pool = stack.pool()
        kill(pool, signal.SIGSTOP)
        stack.process.terminate()
        assert stack.wait() == 0
        kill(pool, signal.SIGCONT)
        stack.assert_nothing_left()


# Before and behind


def test_a_reader_of_the_log_that_has_stopped_stops_nobody() -> None:
    read, write = os.pipe()
    with place() as directory, open(read, "rb"), open(write, "wb") as log:
        process = start(APP, workers=2, env=environment(directory, {"tag": TAG}), cwd=directory, stderr=log)
        with process:
            try:
                assert process.stdout is not None
                port = int(re.findall(rb":(\d+)$", process.stdout.readline().strip())[0])
                with tempfile.TemporaryFile() as nothing:
                    stack = Stack(process, port, nothing, directory)
                    try:
                        stack.wait_ready()
                    except AssertionError:
                        os.set_blocking(read, False)
                        raise AssertionError(os.read(read, 100_000)[:6000]) from None
                    until(stack.all_ready, "every web process knows")
                    clients = Clients(stack)
                with threads(8, clients.run):
                    until(lambda: clients.right > 100, "load", 60)
                    fill(write)
                    killed = stack.compute()[0]
                    kill(killed)
                    answered = clients.right
                    until(lambda: clients.right > answered + 500, "answers go on", 60)
                    # The pool has something to say, too.
                    until(lambda: len(set(stack.compute()) - {killed}) == 2, "the worker is replaced")
                assert clients.failures == []
                process.terminate()
                assert process.wait(PATIENCE_S) == 0
                until(lambda: not titles(directory), "all gone")
            finally:
                end_all(directory)


def fill(pipe: int) -> None:
    """Write until it takes no more; flags are those of a description of our own."""
    full = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with open(full, "wb", buffering=0) as file:
        while file.write(b"x" * 4096) is not None or file.write(b"x") is not None:
            pass


def test_two_services_side_by_side_do_not_touch_each_other() -> None:
    with place() as directory:
        # One runtime directory for both, as for one user.
        shared = {"HEADRACE_RUNTIME_DIR": str(directory / "run")}
        with service({"tag": TAG}, env=shared) as one, tagging(one) as clients:
            processes = one.titles()
            for _ in range(2):
                with service({"tag": TAG}, env=shared) as two:
                    assert two.predict("tag", nonce=1)[0] == 200
                    assert len(list((directory / "run").iterdir())) == 2
                    end_all(two.directory, two.process.wait)
                answered = clients.right
                until(lambda answered=answered: clients.right > answered + 50, "the first one serves")  # type: ignore[misc]
            with service({"tag": TAG}, env=shared):
                assert len(list((directory / "run").iterdir())) == 2
            assert one.titles() == processes

"""The pool against models that go wrong, and against what can befall processes. Real ones, each told to misbehave."""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.workers.drivers import Call, client_of, predicting, wait_depth, x
from tests.workers.pools import (
    ROOT,
    PoolProcess,
    alive,
    children,
    core,
    pool,
    send,
    state_of,
    targets,
    title,
    tree,
    until,
    wait_free,
    wait_replicas,
    wait_state,
)
from workers import (
    DeadlineExceeded,
    Future,
    InvalidInput,
    ModelFailed,
    NotReady,
    PoolError,
    PoolLost,
    Refused,
    State,
    ThreadClient,
    WorkerDied,
)
from workers.model import Array
from workers.records import SlotState

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
    with pool(MODELS) as running:
        with client_of(running.socket_path) as client:
            wait_replicas(client, *MODELS)
        yield running


@pytest.fixture
def client(zoo: PoolProcess) -> Iterator[ThreadClient]:
    with client_of(zoo.socket_path) as it:
        wait_replicas(it, *MODELS)
        yield it
        wait_free(it)
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


# Batching.

BATCHING: dict[str, dict[str, object]] = {
    "greedy": {"model": "Pid", "max_batch": 16},
    "patient": {"model": "Pid", "max_batch": 4, "max_delay_ms": 300},
    "waiting": {"model": "Pid", "max_batch": 4, "max_delay_ms": 10_000},
    "pair": {"model": "Pid", "max_batch": 8, "max_delay_ms": 500, "replicas": 2},
    "stopped": {"model": "Pid", "max_batch": 8, "max_delay_ms": 500},
    "shared": {"model": "Pid", "max_batch": 8, "max_delay_ms": 1000},
}


@pytest.fixture(scope="module")
def batching() -> Iterator[PoolProcess]:
    with pool(BATCHING) as running, client_of(running.socket_path) as client:
        wait_replicas(client, *BATCHING)
        yield running


@pytest.fixture
def batcher(batching: PoolProcess) -> Iterator[ThreadClient]:
    with client_of(batching.socket_path) as it:
        wait_replicas(it, *BATCHING)
        yield it
        wait_free(it)


def rows_of(futures: list[Future]) -> list[int]:
    return [int(future.result()["rows"][0]) for future in futures]


def test_what_waits_runs_together(batcher: ThreadClient, batching: PoolProcess) -> None:
    worker = batching.worker("greedy")
    send(worker, signal.SIGSTOP)
    until(lambda: state_of(worker) == "T", "stopped")
    futures = [batcher.submit("greedy", {"x": x(1)}) for _ in range(20)]
    send(worker, signal.SIGCONT)
    # It may have been woken by the first.
    assert sorted(rows_of(futures))[-16:] == [16] * 16


def test_tasks_of_several_clients_run_together(batcher: ThreadClient, batching: PoolProcess) -> None:
    with client_of(batching.socket_path) as other:
        wait_replicas(other, *BATCHING)
        futures = [client.submit("shared", {"x": x(1)}) for _ in range(4) for client in (batcher, other)]
        assert rows_of(futures) == [8] * 8
        wait_free(other)


def test_concurrent_callers_share_batches(batcher: ThreadClient) -> None:
    def ask() -> list[int]:
        return [int(batcher.predict("patient", {"x": x(1)})["rows"][0]) for _ in range(3)]

    calls = [Call(ask) for _ in range(8)]
    rows = [n for call in calls for n in call.result()]  # type: ignore[attr-defined]
    assert len(rows) / sum(1 / n for n in rows) > 2, "mean size of a batch"


def test_a_lone_task_waits_for_mates_as_long_as_it_may(batcher: ThreadClient) -> None:
    began = time.monotonic()
    assert rows_of([batcher.submit("patient", {"x": x(1)})]) == [1]
    assert 0.29 < time.monotonic() - began < 1


def test_a_full_batch_does_not_wait(batcher: ThreadClient) -> None:
    began = time.monotonic()
    assert rows_of([batcher.submit("waiting", {"x": x(1)}) for _ in range(4)]) == [4] * 4
    assert time.monotonic() - began < 2


def test_two_replicas_do_not_split_a_batch(batcher: ThreadClient) -> None:
    for _ in range(5):
        assert rows_of([batcher.submit("pair", {"x": x(1)}) for _ in range(8)]) == [8] * 8


def test_a_worker_stopped_while_it_gathers_is_replaced(batcher: ThreadClient, batching: PoolProcess) -> None:
    """What it holds is in no queue; it is answered all the same."""
    worker = batching.worker("stopped")
    future = batcher.submit("stopped", {"x": x(1)})
    until(lambda: queue_depth(batcher, "stopped") == 0, "it has taken the task", 0.4)
    send(worker, signal.SIGSTOP)
    answer = future.result(10)
    assert answer["pid"] != worker
    assert not alive(worker)
    wait_replicas(batcher, "stopped")


def queue_depth(client: ThreadClient, model: str) -> int:
    import fcntl
    import termios

    queue = client._connection._queues[model]  # type: ignore[union-attr]
    return int.from_bytes(fcntl.ioctl(queue, termios.FIONREAD, bytes(4)), "little") // 64


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


# Processes are stopped and killed.

PROCESSES: dict[str, dict[str, object]] = {
    "echo": {"model": "Echo"},
    "pair": {"model": "Pid", "replicas": 2},
    "slow": {"model": "Slow", "max_batch": 1, "timeout_s": 1.5},
}


@pytest.fixture
def processes() -> Iterator[tuple[PoolProcess, ThreadClient]]:
    with pool(PROCESSES) as running, client_of(running.socket_path) as client:
        wait_replicas(client, *PROCESSES)
        yield running, client
        wait_replicas(client, *PROCESSES)
        wait_free(client)


Both = tuple[PoolProcess, ThreadClient]


def state_word(client: ThreadClient) -> int:
    """The state of the only task under way."""
    inside = core(client)
    states = [inside.arena.words[task.base >> 3] & 0xFF for task in list(inside._tasks.values())]
    return states[0] if len(states) == 1 else -1


def ms(value: float) -> Array:
    return np.array([value], np.float32)


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
    calls = [predicting(client, "slow", ms=ms(100)) for _ in range(4)]
    calls += [predicting(client, "pair", x=x(1)) for _ in range(20)]
    for name in PROCESSES:
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
    until(lambda: state_word(client) == SlotState.RUNNING, "it is at work")
    send(worker, signal.SIGSTOP)
    behind = client.submit("slow", {"ms": ms(1)}, deadline=time.monotonic() + 20)
    assert isinstance(call.failure(2.5), DeadlineExceeded)
    until(lambda: not alive(worker), "it is gone", 1)
    assert behind.result()["ms"] == 1


def test_a_stopped_pool_is_in_nobodys_way_and_kills_nobody_after(processes: Both) -> None:
    """Its workers were stopped too, as in a machine that stands still: they have a moment to go on."""
    running, client = processes
    before = [running.workers(name) for name in PROCESSES]
    # Once introduced to each other, client and worker need the pool no more.
    client.predict("echo", {"x": x(1)})
    # The worker is over its limit of 1.5 s by the time that anybody looks again, and not done yet.
    future = client.submit("slow", {"ms": ms(2500)}, deadline=time.monotonic() + 20)
    until(lambda: state_word(client) == SlotState.RUNNING, "it is at work")
    stopped = [running.pid, running.worker("slow")]
    for pid in stopped:
        send(pid, signal.SIGSTOP)
    began = time.monotonic()
    while time.monotonic() < began + 2:
        assert client.predict("echo", {"x": x(1)})["y"] == 1
    for pid in stopped:
        send(pid, signal.SIGCONT)
    assert future.result()["ms"] == 2500
    assert [running.workers(name) for name in PROCESSES] == before


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


def arenas(pid: int) -> int:
    """Arenas that the process has mapped."""
    return sum("headrace-arena" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def spills(pid: int) -> int:
    return sum("headrace-spill" in target for target in targets(pid))


def test_a_client_that_talks_nonsense_is_dropped_and_nobody_else(processes: Both) -> None:
    import socket

    running, client = processes
    for packet in (b"nonsense", b"[]", b'["Register",{"pid":1}]', b'["Nobody",{}]', b'["Spill",{"spill":7}]', b"\xff"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(running.socket_path)
            assert b"Welcome" in sock.recv(4096)
            sock.send(packet)
            assert sock.recv(4096) == b""
    assert client.predict("echo", {"x": x(1)})["y"] == 1


def test_a_pool_without_descriptors_serves_on_and_recovers(processes: Both) -> None:
    running, client = processes
    client.predict("echo", {"x": x(1)})
    held = len(targets_of(running.pid))
    soft, hard = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (highest(running.pid) + 1, hard))
    try:
        send(running.worker("echo"), signal.SIGKILL)
        until(lambda: "cannot be started" in client.statuses()["echo"].reason, "it says what is wrong")
        assert client.predict("pair", {"x": x(1)})["rows"] == 1
    finally:
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert client.predict("echo", {"x": x(1)}, deadline=time.monotonic() + 20)["y"] == 1
    wait_replicas(client, *PROCESSES)
    until(lambda: len(targets_of(running.pid)) == held, "no descriptor was lost")


def targets_of(pid: int) -> list[str]:
    return [entry.name for entry in Path(f"/proc/{pid}/fd").iterdir()]


def highest(pid: int) -> int:
    return max(map(int, targets_of(pid)))


# Threads.


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


# Memory.


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


def test_many_clients_come_and_go(processes: Both) -> None:
    running, client = processes
    held = len(targets_of(running.pid))
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
    until(lambda: len(targets_of(running.pid)) == held, "the pool holds nothing of them")
    until(lambda: arenas(running.worker("echo")) == 1, "nor does the worker")
    assert core(client).leased == 0

"""The kill storm: processes are killed and stopped at random instants under eight clients, and every answer is right
or a typed error, none is lost, and no slot stays out.

`HRTEST_STORM_S` is the length of each round in seconds, `HRTEST_STORM_SEED` makes its choices again.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.lengths import SEED, STORM_S
from tests.models import talk
from tests.workers.drivers import Call, client_of
from tests.workers.pools import ROOT, PoolProcess, alive, arenas, pool, send, until, wait_free, wait_replicas
from workers import DeadlineExceeded, Overloaded, PoolError, ThreadClient, WorkerDied

CALLERS = 8
EXPECTED = {WorkerDied, DeadlineExceeded, Overloaded}
"""What a caller may get instead of an answer: nothing that means a fault of the pool's own."""
MODELS: dict[str, dict[str, object]] = {
    "tag": {"model": "DelayedTag", "replicas": 3, "max_batch": 8, "timeout_s": 4.0},
    "patient": {"model": "DelayedTag", "replicas": 2, "max_batch": 8, "max_delay_ms": 2, "timeout_s": 4.0},
    "echo": {"model": "Echo", "replicas": 2, "timeout_s": 4.0},
    "talk": {"model": "tests.models.talk:Talk", "replicas": 2, "timeout_s": 4.0},
    "steps": {"model": "tests.models.talk:Steps", "replicas": 2, "timeout_s": 4.0},
}


@pytest.fixture
def running() -> Iterator[PoolProcess]:
    print(f"seed {SEED}")
    with pool(MODELS) as it:
        yield it


def storm(seed: int, strike: Callable[[random.Random], None]) -> None:
    """Strike at random instants until the time is over."""
    dice = random.Random(seed)
    end = time.monotonic() + STORM_S
    pause = threading.Event()
    while time.monotonic() < end:
        pause.wait(dice.expovariate(6))
        strike(dice)


def strike_workers(running: PoolProcess) -> Callable[[random.Random], None]:
    def strike(dice: random.Random) -> None:
        workers = running.workers(dice.choice([*MODELS]))
        if not workers:
            return
        victim = dice.choice(workers)
        if dice.random() < 0.2:
            send(victim, signal.SIGSTOP)
            threading.Event().wait(dice.uniform(0, 0.2))
            send(victim, signal.SIGCONT)
        else:
            send(victim, signal.SIGKILL)

    return strike


def ask(client: ThreadClient, dice: np.random.Generator) -> str:
    """One task, its answer held against its own nonce; how it ended."""
    model = str(dice.choice([*MODELS]))
    rows = int(dice.integers(1, 5))
    deadline = time.monotonic() + 4
    try:
        if model in ("talk", "steps"):
            listen(client, model, dice, deadline)
            return "right"
        if model == "echo":
            # From some bytes up to more than any slot holds.
            size = int(dice.choice([1, 100, 5_000, 50_000, 300_000]))
            sent = dice.random((1, size), np.float32)
            answer = client.predict("echo", {"x": sent}, deadline=deadline)["y"]
        else:
            sent = dice.integers(0, 1 << 63, rows, np.uint64)
            ms = np.full(rows, dice.choice([0, 0, 1, 5]), np.float32)
            answer = client.predict(model, {"nonce": sent, "ms": ms}, deadline=deadline)["nonce"]
    except PoolError as error:
        assert type(error) in EXPECTED, repr(error)
        return type(error).__name__
    assert answer.shape == sent.shape and answer.tobytes() == sent.tobytes(), "somebody else's answer"
    return "right"


def listen(client: ThreadClient, model: str, dice: np.random.Generator, deadline: float) -> None:
    """One stream, whose pieces carry its own nonce, to the end or not."""
    nonce, count, size = (
        int(dice.integers(1, 1 << 62)),
        int(dice.choice([0, 1, 5, 50])),
        int(dice.choice([0, 90, 5000])),
    )
    until = int(dice.integers(0, 100))
    stream = client.stream(model, talk.ask(nonce, count, size=size), deadline=deadline)
    came: list[bytes] = []
    try:
        while len(came) < until and (found := next(stream, None)) is not None:
            came.append(found)
    finally:
        stream.close()
        assert came == [talk.piece(nonce, number, size) for number in range(len(came))], "somebody else's pieces"
    assert len(came) == min(until, count), "an end before the end"


class Asking:
    """So many callers of one client that ask one task after the other."""

    def __init__(self, client: ThreadClient, callers: int, seed: int) -> None:
        self._stop = threading.Event()
        self._calls = [Call(lambda n=n: self._keep_asking(client, [seed, n])) for n in range(callers)]  # type: ignore[misc]

    def _keep_asking(self, client: ThreadClient, seed: list[int]) -> Counter[str]:
        dice = np.random.default_rng(seed)
        ends: Counter[str] = Counter()
        while not self._stop.is_set():
            ends[ask(client, dice)] += 1
        return ends

    def end(self) -> Counter[str]:
        """How their tasks ended, each by its kind."""
        self._stop.set()
        ends: Counter[str] = Counter()
        for call in self._calls:
            ends += call.result()  # type: ignore[arg-type]
        return ends


def test_killed_and_stopped_workers_cost_no_answer(running: PoolProcess) -> None:
    with client_of(running.socket_path) as client:
        wait_replicas(client, *MODELS)
        asking = Asking(client, CALLERS, SEED)
        storm(SEED, strike_workers(running))
        ends = asking.end()
        deaths = sum(status.restarts for status in client.statuses().values())
        print(f"{deaths} deaths, {dict(ends)}")
        assert deaths > STORM_S, "not much of a storm"
        assert ends["right"] > 10 * STORM_S
        assert ends["right"] > 0.9 * ends.total()
        wait_free(client)
        wait_replicas(client, *MODELS)
        dice = np.random.default_rng(SEED)
        assert [ask(client, dice) for _ in range(50)] == ["right"] * 50
        wait_free(client)


CLIENT = "import sys; from tests.workers.test_storm import main; main(*sys.argv[1:])"


def main(socket_path: str, seed: str) -> None:
    """A client process of the second round: asks until its standard input ends, then gives its account."""
    with client_of(socket_path) as client:
        client.wait_ready()
        print("ready", flush=True)
        asking = Asking(client, 3, int(seed))
        sys.stdin.read()
        ends = asking.end()
        wait_free(client)
        print(dict(ends), flush=True)


def begin(running: PoolProcess, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, running.socket_path, str(seed)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def close(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def test_killed_clients_cost_the_others_nothing(running: PoolProcess) -> None:
    seeds = iter(range(SEED, SEED + 1_000_000))
    clients = [begin(running, next(seeds)) for _ in range(3)]
    deaths = 0
    try:
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == "ready\n"

        def strike(dice: random.Random) -> None:
            nonlocal deaths
            strike_workers(running)(dice)
            if dice.random() < 0.15:
                deaths += 1
                victim = dice.randrange(1, 3)
                clients[victim].kill()
                clients[victim].wait()
                close(clients[victim])
                clients[victim] = begin(running, next(seeds))

        storm(SEED, strike)
        print(f"{deaths} clients died")
        for client in clients:
            out, _ = client.communicate(timeout=30)
            # The last to begin may have had no time to.
            print(out)
            assert client.returncode == 0, out
            assert "'right'" in out or client is not clients[0]
    finally:
        for client in clients:
            client.kill()
            client.wait()
            close(client)
    assert deaths
    with client_of(running.socket_path) as after:
        wait_replicas(after, *MODELS)
        dice = np.random.default_rng(SEED)
        assert [ask(after, dice) for _ in range(50)] == ["right"] * 50
        wait_free(after)
        for name in MODELS:
            for pid in running.workers(name):
                until(lambda pid=pid: arenas(pid) <= 1, "nothing of the dead clients is kept")  # type: ignore[misc]
        until(lambda: arenas(running.pid) == 1, "nothing of the dead clients is kept")
    assert alive(running.pid)

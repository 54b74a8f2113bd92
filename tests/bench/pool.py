"""What the pool costs, as ratios to the bare mechanism, measured in turns in one run.

    python -m tests.bench.pool

Every figure is of the shipped defaults but for what its row says. The machine's load moves the absolute numbers;
the ratios are medians over rounds that alternate both sides.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from workers import ThreadClient
from workers.arena import reserve

ROUNDS = int(os.environ.get("HEADRACE_BENCH_ROUNDS", "9"))
ROOT = Path(__file__).parents[2]
WEIGHTS_MB = 400
CONFIG = """
[models.score]
model = "workers.models.dense:Dense"

[models.copy]
model = "tests.models.mlp:Copy"

[models.one]
model = "tests.models.mlp:Mlp"
max_delay_ms = 5

[models.two]
model = "tests.models.mlp:Mlp"
max_delay_ms = 5
replicas = 2
"""
WEIGHING = """
[models.big]
model = "tests.models.zoo:BigWeights"
replicas = 2
options = {{ mb = {mb} }}
"""


@contextlib.contextmanager
def running_pool(models: str = CONFIG) -> Iterator[tuple[ThreadClient, int]]:
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "headrace.toml")
        config.write_text(models)
        socket_path = str(Path(directory, "pool.sock"))
        env = dict(os.environ, HEADRACE_CONFIG=str(config), HEADRACE_POOL_SOCKET=socket_path)
        pool = subprocess.Popen(
            [sys.executable, "-m", "workers"], env=env, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            with ThreadClient(socket_path) as client:
                client.wait_ready(60)
                yield client, pool.pid
        finally:
            pool.terminate()
            pool.wait(30)


def worker_pids(pool: int, model: str) -> list[int]:
    """The pids of a model's workers, by index."""
    titles = {
        Path(f"/proc/{child}/cmdline").read_bytes(): int(child)
        for child in Path(f"/proc/{pool}/task/{pool}/children").read_text().split()
    }
    return [titles[title] for title in sorted(titles) if title.startswith(f"headrace worker {model}[".encode())]


@contextlib.contextmanager
def ping_pong() -> Iterator[tuple[Callable[[], None], int]]:
    """A process that answers 64 bytes on one pipe with 16 on another, and nothing else."""
    to_read, to_write = os.pipe()
    back_read, back_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(to_write)
        os.close(back_read)
        while data := os.read(to_read, 64):
            os.write(back_write, data[:16])
        os._exit(0)
    os.close(to_read)
    os.close(back_write)
    message = bytes(64)

    def once() -> None:
        os.write(to_write, message)
        os.read(back_read, 16)

    try:
        yield once, child
    finally:
        os.close(to_write)
        os.close(back_read)
        os.waitpid(child, 0)


def times(once: Callable[[], object], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        once()
        taken.append(time.perf_counter() - begun)
    return taken


def round_trip(client: ThreadClient, pool: int) -> None:
    inputs = {"features": np.array([[1, 2, 3, 4]], np.float32)}
    (worker,) = worker_pids(pool, "score")
    cpus = sorted(os.sched_getaffinity(0))
    with ping_pong() as (bare, child):
        places = {"a core each": ({cpus[0]}, {cpus[-1]}), "one core": ({cpus[0]}, {cpus[0]})}
        places["as scheduled"] = (set(cpus), set(cpus))
        for place, (ours, theirs) in places.items():
            os.sched_setaffinity(0, ours)
            os.sched_setaffinity(child, theirs)
            os.sched_setaffinity(worker, theirs)
            rounds = []
            for _ in range(ROUNDS):
                floor = median(times(bare, 1000))
                predict = median(times(lambda: client.predict("score", inputs), 1000))
                rounds.append((predict, floor, predict / floor))
            row(
                f"round trip of a 4-float predict, {place}",
                f"{median(r[0] for r in rounds) * 1e6:.0f} µs",
                f"bare ping-pong {median(r[1] for r in rounds) * 1e6:.0f} µs",
                f"{median(r[2] for r in rounds):.1f} x",
                "<= 3 x",
            )
        os.sched_setaffinity(0, set(cpus))
        os.sched_setaffinity(worker, set(cpus))


def pipelined(client: ThreadClient, model: str, inputs: dict[str, np.ndarray], outstanding: int, count: int) -> float:
    """Predicts a second with so many futures outstanding from one thread."""
    futures = deque(client.submit(model, inputs) for _ in range(outstanding))
    begun = time.perf_counter()
    for _ in range(count):
        futures.popleft().result()
        futures.append(client.submit(model, inputs))
    taken = time.perf_counter() - begun
    while futures:
        futures.popleft().result()
    return count / taken


def throughput(client: ThreadClient) -> None:
    inputs = {"features": np.array([[1, 2, 3, 4]], np.float32)}
    rates = [pipelined(client, "score", inputs, 64, 20_000) for _ in range(ROUNDS)]
    row("predicts a second, 64 futures, one thread", f"{median(rates):,.0f}", "", "", ">= 60,000")


def large_tensor(client: ThreadClient) -> None:
    tensor = np.random.default_rng(1).random((1, 2 << 20), np.float32)
    answer = np.empty_like(tensor)
    shared = np.memmap(os.fdopen(reserve("bench", tensor.nbytes), "r+b"), np.float32, shape=tensor.shape)

    def floor() -> None:
        np.copyto(shared, tensor)
        np.copyto(answer, shared)

    def in_place() -> None:
        with client.submit("copy", {"x": tensor}).answer() as outputs:
            assert outputs["y"][0, -1] == tensor[0, -1]

    def copied_out() -> None:
        with client.submit("copy", {"x": tensor}).answer() as outputs:
            np.copyto(answer, outputs["y"])

    for what, ours in (("answer read in place", in_place), ("answer copied out", copied_out)):
        rounds = []
        times(ours, 20)
        for _ in range(ROUNDS):
            bare, through = median(times(floor, 50)), median(times(ours, 50))
            rounds.append((through, bare, through / bare))
        row(
            f"8 MiB tensor there and back, {what}",
            f"{median(r[0] for r in rounds) * 1e3:.2f} ms",
            f"memcpy in and out {median(r[1] for r in rounds) * 1e3:.2f} ms",
            f"{median(r[2] for r in rounds):.2f} x",
            "<= 2 x",
        )


def replicas(client: ThreadClient) -> None:
    inputs = {"pixels": np.random.default_rng(1).random((1, 784), np.float32)}
    rounds = []
    for model in ("one", "two"):
        pipelined(client, model, inputs, 32, 200)
    for i in range(ROUNDS):
        # Whoever goes first finds other caches and another clock.
        order = ("one", "two") if i % 2 else ("two", "one")
        rate = {model: pipelined(client, model, inputs, 32, 1500) for model in order}
        rounds.append((rate["two"], rate["one"], rate["two"] / rate["one"]))
    row(
        "MLP, 32 in flight, max_delay_ms 5: two replicas",
        f"{median(r[0] for r in rounds):,.0f} / s",
        f"one replica {median(r[1] for r in rounds):,.0f} / s",
        f"{median(r[2] for r in rounds):.2f} x",
        ">= 1 x",
    )


def shared_weights() -> None:
    """Memory, unlike time, is the same however busy the machine is."""
    much, little = held_with_weights(WEIGHTS_MB), held_with_weights(1)
    row(
        f"memory (PSS) of a pool and two replicas with {WEIGHTS_MB} MB of shared weights",
        f"{much:.0f} MB",
        f"with 1 MB of weights {little:.0f} MB; two copies are {2 * WEIGHTS_MB} MB",
        f"{much - little:.0f} MB more",
        f"about {WEIGHTS_MB} MB more",
    )


def held_with_weights(mb: int) -> float:
    """Megabytes of the pool and two replicas that share so many, each page of them read by both."""
    with running_pool(WEIGHING.format(mb=mb)) as (client, pool):
        seen: set[int] = set()
        while len(seen) < 2:
            answer = client.predict("big", {"x": np.ones(1, np.float32)})
            seen.add(int(answer["pid"][0]))
        return sum(pss_mb(pid) for pid in (pool, *worker_pids(pool, "big")))


def pss_mb(pid: int) -> float:
    """What falls to a process of the memory that is mapped, shared pages in part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    row("what", "figure", "beside", "ratio", "wanted")
    row(*["---"] * 5)
    with running_pool() as (client, pool):
        round_trip(client, pool)
        throughput(client)
        large_tensor(client)
        replicas(client)
    shared_weights()


if __name__ == "__main__":
    main()

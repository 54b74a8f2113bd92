"""What streams cost on both sides of the pipe: many that are stepped together, a piece each per 20 ms.

    python -m tests.bench.pool_streams

The figures are processor time per piece, all that the process did included: the worker's is the model's own share, too,
and the client's is that of gevent's hub with a callback for each stream, which takes and grants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import gevent.monkey

gevent.monkey.patch_all()

import gevent.event  # noqa: E402

from tests.bench.pool import row  # noqa: E402
from tests.workers.drivers import Driver, client_of  # noqa: E402
from tests.workers.pools import PoolProcess, wait_free, wait_replicas  # noqa: E402
from workers.model import Array, TensorSpec  # noqa: E402

PIECES = 50
PACE_S = 0.02
STREAMS = (500, 2000, 5000)
ARENA = {"slots": [[4096, 6000]], "spill_limit": 1 << 20}


class Paced:
    """Says "token " at each step, `PIECES` times; a step takes `PACE_S`."""

    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None:
        self.next = 0.0

    def start(self, request: dict[str, Array]) -> list[int]:
        return [0]

    def step(self, states: Sequence[list[int]]) -> list[str | None]:
        time.sleep(max(0.0, self.next - time.monotonic()))
        self.next = time.monotonic() + PACE_S
        answers: list[str | None] = []
        for state in states:
            state[0] += 1
            answers.append("token " if state[0] <= PIECES else None)
        return answers


class Reader:
    """Takes what has come, in the hub."""

    def __init__(self, client: Driver, over: gevent.event.Event, left: set[Reader], gaps: list[float]) -> None:
        self._left, self._over, self._gaps = left, over, gaps
        self._last = 0.0
        self.pieces = 0
        left.add(self)
        self._stream = client.stream("paced", {})
        self._stream.notify(self._heard)

    def _heard(self) -> None:
        self.pieces += len(self._stream.take())
        self._stream.grant()
        now = time.perf_counter()
        if self._stream.ended:
            self._left.discard(self)
            if not self._left:
                self._over.set()
        elif self._last:
            self._gaps.append(now - self._last)
        self._last = now


def measure(client: Driver, worker: int, count: int) -> None:
    over, left, gaps = gevent.event.Event(), set[Reader](), list[float]()
    begun, ours, theirs = time.perf_counter(), time.process_time(), seconds_of(worker)
    readers = [Reader(client, over, left, gaps) for _ in range(count)]
    assert over.wait(60)
    taken = time.perf_counter() - begun
    ours, theirs = time.process_time() - ours, seconds_of(worker) - theirs
    assert all(reader.pieces == PIECES for reader in readers)
    wait_free(client)
    total = count * PIECES
    row(
        f"{count:,}",
        f"{taken:.2f} s",
        f"{sorted(gaps)[len(gaps) * 99 // 100] * 1e3:.0f} ms",
        f"{theirs / total * 1e6:.2f} µs",
        f"{ours / total * 1e6:.2f} µs",
    )


def seconds_of(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    row(
        "streams",
        f"{PIECES} pieces, {PACE_S * 1e3:.0f} ms apart, in",
        "gap p99",
        "worker per piece",
        "client per piece",
    )
    row(*["---"] * 5)
    models = {"paced": {"model": "tests.bench.pool_streams:Paced", "max_queue": 6000}}
    with TemporaryDirectory() as directory:
        pool = PoolProcess(Path(directory), models, ARENA)
        try:
            with client_of(pool.socket_path) as client:
                wait_replicas(client, "paced")
                for count in STREAMS:
                    measure(client, pool.worker("paced"), count)
        finally:
            pool.stop()


if __name__ == "__main__":
    main()

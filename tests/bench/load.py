"""Load on one server, and what came of it: by wrk, and by a client that tells its connections apart."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.servers import BODY, ROOT, Server, busy_s

SCRIPT = Path(__file__).with_name("score.lua")
GRACE_S = 20.0


@dataclass(frozen=True)
class Run:
    """One run under load. CPU is that of all the server's processes, for one request; `web_cpu_us` is the web process's
    part of it, where gunicorn runs that. `others` is how many processors worked for neither side."""

    rate: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_us: float
    web_cpu_us: float
    others: float


@dataclass(frozen=True)
class FairRun:
    """One run of connections told apart: the ratio of the largest of their medians to the smallest, and how many
    answers the one with fewest and the one with most have got."""

    rate: float
    unfairness: float
    fastest_ms: float
    slowest_ms: float
    fewest: int
    most: int
    errors: int


class Usage:
    """Who has used the processors since it was made. `ours` is the load generator, a child that has been waited for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = server.cpu()
        self._ours = _children_s()
        self._busy = busy_s()

    def server_s(self) -> dict[int, float]:
        return {pid: seconds - self._before.get(pid, 0.0) for pid, seconds in self._server.cpu().items()}

    def others_s(self, server_s: float) -> float:
        return max(0.0, busy_s() - self._busy - (_children_s() - self._ours) - server_s)


def find_wrk() -> str:
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("wrk, the load generator, is missing: sudo apt-get install wrk")
    return wrk


def wrk(server: Server, path: str, connections: int, seconds: int) -> Run:
    server.shorten_logs()
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "result")
        command = [find_wrk(), "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", str(SCRIPT)]
        usage = Usage(server)
        subprocess.run(
            [*command, f"http://127.0.0.1:{server.port}{path}"],
            env={**os.environ, "BENCH_BODY": BODY.decode(), "BENCH_RESULT": str(result)},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=seconds + GRACE_S,
        )
        used = usage.server_s()
        others_s = usage.others_s(sum(used.values()))
        told = json.loads(result.read_text())
    requests, taken_s = told["requests"], told["us"] / 1e6
    if not requests:
        raise AssertionError(f"{server.name} has answered nothing at {path}")
    return Run(
        rate=requests / taken_s,
        p50_ms=told["p50_us"] / 1e3,
        p99_ms=told["p99_us"] / 1e3,
        errors=told["refused"] + told["broken"],
        cpu_us=sum(used.values()) / requests * 1e6,
        web_cpu_us=used.get(server.web() or 0, 0.0) / requests * 1e6,
        others=others_s / taken_s,
    )


def each_connection(server: Server, path: str, connections: int, seconds: int) -> FairRun:
    server.shorten_logs()
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.connections", str(server.port), path, str(connections), str(seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=seconds + GRACE_S,
    )
    return FairRun(**json.loads(done.stdout))


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

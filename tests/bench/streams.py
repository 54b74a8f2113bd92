"""What streams of server-sent events cost, beside a Flask generator that only sleeps in its web process.

    python -m tests.bench.streams [--only paced,event,idle,storm]

Every stream has 50 events, 20 ms apart. Headrace's come from one compute process, by a model that streams by steps;
there is one web process. Both servers are up all the time and take turns. Figures are medians over the rounds, ratios
are formed within a round. The clients are one process on the same processors. HEADRACE_BENCH_ROUNDS,
HEADRACE_BENCH_SECONDS and HEADRACE_BENCH_STORM_S (30) make it shorter or longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.bench.listeners import Heard
from tests.bench.load import Usage, find_wrk, wrk
from tests.bench.servers import Server, processes, running, title, wait_until
from tests.bench.tables import end, heading, row, verdict
from tests.bench.ticks import EVENTS, PACE_S

ROUNDS = int(os.environ.get("HEADRACE_BENCH_ROUNDS", "5"))
SECONDS = int(os.environ.get("HEADRACE_BENCH_SECONDS", "3"))
STORM_S = int(os.environ.get("HEADRACE_BENCH_STORM_S", "30"))

OURS, PEER = "headrace-streams", "flask-streams"
NAMES = {OURS: "Headrace, from a compute process", PEER: "Flask, sleeping in the web process"}
COUNTS = (1, 100, 500, 1000, 2000)
PARTS = ("paced", "event", "idle", "storm")
IDLE = 2000
STORM_RATE = 500


def listeners(server: Server, path: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.listeners", str(server.port), path, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(server: Server, streams: int) -> tuple[Heard, float]:
    """One burst of streams, and how many processors worked for neither side meanwhile."""
    server.shorten_logs()
    usage = Usage(server)
    begun = time.monotonic()
    said, _ = listeners(server, "/ticks", streams, EVENTS).communicate(timeout=120)
    others = usage.others_s(sum(usage.server_s().values())) / (time.monotonic() - begun)
    return Heard(**json.loads(said)), others


@contextlib.contextmanager
def held_open(server: Server, path: str, streams: int) -> Iterator[None]:
    """So many streams, each of which has had an event."""
    clients = listeners(server, path, streams, "-", 300)
    try:
        assert clients.stdout is not None
        said = clients.stdout.readline()
        if said != "listening\n":
            raise AssertionError(f"{streams} streams of {path}: {said!r}")
        yield
    finally:
        clients.communicate(timeout=30)
        wait_until(lambda: not open_streams(server), "every stream is gone", 30)


def open_streams(server: Server) -> int:
    """Sockets of its web process, but for those that it always has, are its connections."""
    web = server.web()
    return 0 if web is None else len(sockets_of(web)) - server_sockets(server)


def sockets_of(pid: int) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(fd)).startswith("socket:"):
                found.append(target)
    return found


_RESTING: dict[str, int] = {}


def server_sockets(server: Server) -> int:
    return _RESTING[server.name]


def rest(server: Server) -> None:
    """What it has open while nobody asks anything."""
    web = server.web()
    assert web is not None
    last = -1
    while last != (now := len(sockets_of(web))):
        last = now
        time.sleep(0.5)
    _RESTING[server.name] = now


def paced(servers: dict[str, Server]) -> list[float]:
    """Bursts of streams, both servers in turn."""
    others = []
    heading(f"{EVENTS} events, 20 ms apart")
    row("streams", "server", "complete", "wall s", "gap p50 ms", "gap p99 ms", "first event ms")
    row(*["---"] * 7)
    ratios = []
    for streams in COUNTS:
        runs: dict[str, list[Heard]] = {name: [] for name in servers}
        for i in range(ROUNDS):
            for name in servers if i % 2 == 0 else reversed(servers):
                heard, other = hear(servers[name], streams)
                runs[name].append(heard)
                others.append(other)
        for name, its in runs.items():
            row(
                f"{streams:,}",
                NAMES[name],
                f"{sum(run.complete for run in its):,} of {sum(run.streams for run in its):,}",
                f"{median(run.wall_s for run in its):.2f}",
                f"{median(run.gap_p50_ms for run in its):.1f}",
                f"{median(run.gap_p99_ms for run in its):.1f}",
                f"{median(run.first_ms for run in its):.0f}",
            )
        ratios.append((streams, runs))
    print()
    row("streams", "what", "figure", "beside", "ratio", "rounds", "wanted", "held")
    row(*["---"] * 8)
    for streams, runs in ratios:
        for what, unit, digits, of in (
            ("wall", "s", 2, lambda run: run.wall_s),
            ("gap p99", "ms", 1, lambda run: run.gap_p99_ms),
        ):
            ours, theirs = ([of(run) for run in runs[name]] for name in (OURS, PEER))
            row(
                f"{streams:,}",
                what,
                f"{median(ours):.{digits}f} {unit}",
                f"{median(theirs):.{digits}f} {unit}",
                *verdict([a / b for a, b in zip(ours, theirs, strict=True)], most=1.1 if streams == 1000 else None),
            )
    longest = max(run.wall_s for run in ratios[-1][1][OURS])
    row(f"{COUNTS[-1]:,}", "longest wall", f"{longest:.2f} s", "", "", "", "<= 3 s", ("no", "yes")[longest <= 3])
    incomplete = sum(run.streams - run.complete for _, runs in ratios for run in runs[OURS])
    row("all", "streams not complete", f"{incomplete}", "", "", "", "0", ("no", "yes")[not incomplete])
    return others


def event(servers: dict[str, Server]) -> None:
    """What the web process computes for an event: with streams less without any. Few events a second find the process
    asleep and its caches cold each time, so they are the dearest."""
    heading("CPU of the web process for one event, 20 ms apart")
    row("streams", "µs an event", "Flask's", "ratio", "rounds", "wanted", "held")
    row(*["---"] * 7)
    for streams in (1, 100, 1000):
        costs: dict[str, list[float]] = {name: [] for name in servers}
        for i in range(ROUNDS):
            for name in servers if i % 2 == 0 else reversed(servers):
                quiet, _ = web_cpu(servers[name])
                with held_open(servers[name], "/endless", streams):
                    busy, seconds = web_cpu(servers[name])
                costs[name].append((busy - quiet) / (streams * seconds / PACE_S) * 1e6)
        ours, theirs = costs[OURS], costs[PEER]
        ratio, span, _, _ = verdict([a / b for a, b in zip(ours, theirs, strict=True)])
        wanted = ["<= 60 µs", ("no", "yes")[median(ours) <= 60]] if streams == 1 else ["", ""]
        row(f"{streams:,}", f"{median(ours):.1f}", f"{median(theirs):.1f}", ratio, span, *wanted)


def web_cpu(server: Server) -> tuple[float, float]:
    """Seconds that the web process computes in a while, and how long that is."""
    web = server.web()

    def computed() -> float:
        return int(Path(f"/proc/{web}/schedstat").read_text().split()[0]) / 1e9

    before, begun = computed(), time.monotonic()
    time.sleep(SECONDS)
    return computed() - before, time.monotonic() - begun


def idle() -> None:
    """Streams that say nothing: in a server of their own, whose memory has not been grown by others."""
    with running(OURS) as server:
        rest(server)
        wrk(server, "/score", 16, 1)
        before = memory_kb(server)
        alone, beside = [], []
        with held_open(server, "/idle", IDLE):
            each = (memory_kb(server) - before) / IDLE
        for _ in range(ROUNDS):
            alone.append(wrk(server, "/score", 16, SECONDS))
            with held_open(server, "/idle", IDLE):
                beside.append(wrk(server, "/score", 16, SECONDS))
    heading(f"{IDLE:,} streams that say nothing")
    row("what", "figure", "beside", "ratio", "rounds", "wanted", "held")
    row(*["---"] * 7)
    row("memory of all processes for each", f"{each:.1f} kB", "", "", "", "<= 25 kB", ("no", "yes")[each <= 25])
    for what, unit, digits, of, most in (
        ("p99 of /score, 16 connections", "ms", 2, lambda run: run.p99_ms, 1.5),
        ("/score a second", "", 0, lambda run: run.rate, None),
    ):
        ours, theirs = [of(run) for run in beside], [of(run) for run in alone]
        row(
            what,
            f"{median(ours):,.{digits}f} {unit}",
            f"without them {median(theirs):,.{digits}f} {unit}",
            *verdict([a / b for a, b in zip(ours, theirs, strict=True)], most=most),
        )


def memory_kb(server: Server) -> float:
    """What all its processes have in memory, what they share counted once (PSS)."""
    total = 0
    for pid in processes(server.directory):
        if "resource_tracker" not in title(pid):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return float(total)


def storm(server: Server) -> None:
    """Clients that leave at random moments: what is left behind?"""
    with held_open(server, "/endless", 100):
        pass
    before = leftovers(server)
    clients = listeners(server, "/endless", STORM_RATE, "leave", STORM_S)
    came = int(clients.communicate(timeout=STORM_S + 60)[0])
    wait_until(lambda: not open_streams(server), "every stream is gone", 30)
    server.check("/score")
    after = leftovers(server)
    heading(f"{STORM_RATE} clients a second that leave, for {STORM_S} s")
    row("clients", *before)
    row(*["---"] * (len(before) + 1))
    row(f"{came:,}", *(f"{before[what]:,} before, {after[what]:,} after" for what in before))


def leftovers(server: Server) -> dict[str, int]:
    pids = [pid for pid in processes(server.directory) if "resource_tracker" not in title(pid)]
    return {
        "processes": len(pids),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
        "memory MB": round(memory_kb(server) / 1000),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.streams")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between (all: %(default)s)")
    parts = parser.parse_args().only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    find_wrk()
    signal.signal(signal.SIGTERM, end)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    begun = time.monotonic()
    others: list[float] = []
    with running(OURS) as ours, running(PEER) as peer:
        rest(ours)
        rest(peer)
        if "paced" in parts:
            others = paced({OURS: ours, PEER: peer})
        if "event" in parts:
            event({OURS: ours, PEER: peer})
        if "storm" in parts:
            storm(ours)
    if "idle" in parts:
        idle()
    print(
        f"\n{len(os.sched_getaffinity(0))} processors; {ROUNDS} rounds, in all {time.monotonic() - begun:.0f} s.",
        end="",
    )
    if others:
        print(f" Others kept {median(others):.2f} processors busy meanwhile, at most {max(others):.2f}.", end="")
    print()


if __name__ == "__main__":
    main()

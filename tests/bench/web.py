"""What the web tier costs, beside mosec and beside Flask that computes in its own web process.

    python -m tests.bench.web [--only score,access-log,routes,batching,alone,fairness,profile]

One web process and one that computes (Flask: one that does both), one thread of BLAS each, every server with what it
ships with; of Headrace that includes its log line for each request, which goes to a file. The servers are up all the
time and take turns, in an order that alternates. Figures are medians over the rounds; ratios are formed within a round,
and their medians stand with the least and the greatest. HEADRACE_BENCH_ROUNDS and HEADRACE_BENCH_SECONDS make it
shorter or longer. The load comes from wrk, on the same processors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from tests.bench.environments import MOSEC, environment, py_spy
from tests.bench.load import Run, each_connection, find_wrk, wrk
from tests.bench.pieces import own_core, owner, piece, sampled, shares
from tests.bench.servers import Server, running
from tests.bench.tables import end, heading, row, verdict

ROUNDS = int(os.environ.get("HEADRACE_BENCH_ROUNDS", "5"))
SECONDS = int(os.environ.get("HEADRACE_BENCH_SECONDS", "3"))

T = TypeVar("T")


@dataclass(frozen=True)
class Entrant:
    """Who takes part in a comparison: a path of a server."""

    name: str
    server: str
    path: str = "/score"


HEADRACE = Entrant("Headrace", "headrace")
ACCESS_LOG = Entrant("Headrace, with gunicorn's access log", "headrace-access-log")
FLASK_VIEW = Entrant("Headrace, a Flask view", "headrace-routes", "/flask")
BY_NAME = Entrant("Headrace, any model by name", "headrace-routes", "/predict/score")
MOSEC_PEER = Entrant("mosec", "mosec")
MOSEC_BATCHING = Entrant("mosec, told to batch", "mosec-batching")
FLASK_PEER = Entrant("Flask, computing inline", "flask")

# Who has to be there for each part. The first four share their rounds, so that ratios can be formed across them.
PARTS = {
    "score": [HEADRACE, MOSEC_PEER, FLASK_PEER],
    "access-log": [HEADRACE, ACCESS_LOG, MOSEC_PEER, FLASK_PEER],
    "routes": [HEADRACE, FLASK_VIEW, BY_NAME, MOSEC_PEER, FLASK_PEER],
    "batching": [HEADRACE, MOSEC_PEER, MOSEC_BATCHING],
    "alone": [HEADRACE, MOSEC_PEER],
    "fairness": [HEADRACE, FLASK_PEER],
    "profile": [HEADRACE],
}
TOGETHER = ("score", "access-log", "routes", "batching")
Runs = dict[Entrant, list[Run]]


@dataclass(frozen=True)
class Wanted:
    """A ratio that is asked for: of one entrant's figure to another's, within each round."""

    what: str
    entrant: Entrant
    peer: Entrant
    figure: Callable[[Run], float]
    unit: str
    least: float | None = None
    most: float | None = None

    def row(self, runs: Runs) -> None:
        ours, theirs = ([self.figure(run) for run in runs[who]] for who in (self.entrant, self.peer))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        row(
            self.what,
            f"{self.entrant.name} {median(ours):,.{self.digits}f} {self.unit}",
            f"{self.peer.name} {median(theirs):,.{self.digits}f} {self.unit}",
            *verdict(ratios, self.least, self.most),
        )

    @property
    def digits(self) -> int:
        return 2 if self.unit == "ms" else 0


def rate(run: Run) -> float:
    return run.rate


def p50(run: Run) -> float:
    return run.p50_ms


def p99(run: Run) -> float:
    return run.p99_ms


SCORE = [
    Wanted("requests a second", HEADRACE, MOSEC_PEER, rate, "/ s", least=2),
    Wanted("requests a second", HEADRACE, FLASK_PEER, rate, "/ s", least=5),
    Wanted("p99", HEADRACE, MOSEC_PEER, p99, "ms", most=1),
    Wanted("requests a second", ACCESS_LOG, MOSEC_PEER, rate, "/ s", least=1.7),
    Wanted("requests a second", FLASK_VIEW, FLASK_PEER, rate, "/ s"),
    Wanted("requests a second", FLASK_VIEW, MOSEC_PEER, rate, "/ s"),
    Wanted("requests a second", BY_NAME, MOSEC_PEER, rate, "/ s"),
    Wanted("requests a second", HEADRACE, MOSEC_BATCHING, rate, "/ s"),
]
ALONE = [Wanted("p50", HEADRACE, MOSEC_PEER, p50, "ms", most=1.5)]


class Comparison:
    """The servers that are up, and who of them takes part."""

    def __init__(self, servers: dict[str, Server]) -> None:
        self._servers = servers
        self._checked: set[Entrant] = set()
        self.others: list[float] = []
        self.errors = 0

    def present(self, entrants: list[Entrant]) -> list[Entrant]:
        """Those that there are, having been found to answer alike."""
        present = [entrant for entrant in entrants if entrant.server in self._servers]
        for entrant in present:
            if entrant not in self._checked:
                self._servers[entrant.server].check(entrant.path)
                self._checked.add(entrant)
        return present

    def rounds(self, entrants: list[Entrant], run: Callable[[Server, str], T]) -> dict[Entrant, list[T]]:
        runs: dict[Entrant, list[T]] = {entrant: [] for entrant in entrants}
        for i in range(ROUNDS):
            for entrant in entrants if i % 2 == 0 else reversed(entrants):
                runs[entrant].append(run(self._servers[entrant.server], entrant.path))
        return runs

    def throughput(self, entrants: list[Entrant], connections: int, wanted: list[Wanted]) -> None:
        present = self.present(entrants)
        for entrant in present:
            wrk(self._servers[entrant.server], entrant.path, connections, 1)
        runs = self.rounds(present, lambda server, path: wrk(server, path, connections, SECONDS))
        heading(f"POST /score, {connections} connection{'s' if connections > 1 else ''}")
        row("server", "requests / s", "p50 ms", "p99 ms", "CPU µs", "of it web", "errors")
        row(*["---"] * 7)
        for entrant, its in runs.items():
            web = median(run.web_cpu_us for run in its)
            row(
                entrant.name,
                f"{median(run.rate for run in its):,.0f}",
                f"{median(run.p50_ms for run in its):.2f}",
                f"{median(run.p99_ms for run in its):.2f}",
                f"{median(run.cpu_us for run in its):.0f}",
                f"{web:.0f}" if web else "",
                str(sum(run.errors for run in its)),
            )
            self.others += [run.others for run in its]
            self.errors += sum(run.errors for run in its)
        if asked := [one for one in wanted if one.entrant in runs and one.peer in runs]:
            print()
            row("what", "figure", "beside", "ratio", "rounds", "wanted", "held")
            row(*["---"] * 7)
            for one in asked:
                one.row(runs)

    def fairness(self) -> None:
        runs = self.rounds(
            self.present(PARTS["fairness"]), lambda server, path: each_connection(server, path, 64, SECONDS)
        )
        heading("Fairness: 64 connections, each with its own median latency")
        head = ["server", "answers / s", "medians ms", "answers each", "errors", "largest / smallest median"]
        row(*head, "rounds", "wanted", "held")
        row(*["---"] * 9)
        for entrant, its in runs.items():
            self.errors += sum(run.errors for run in its)
            row(
                entrant.name,
                f"{median(run.rate for run in its):,.0f}",
                f"{median(run.fastest_ms for run in its):.2f} to {median(run.slowest_ms for run in its):.2f}",
                f"{median(run.fewest for run in its):.0f} to {median(run.most for run in its):.0f}",
                str(sum(run.errors for run in its)),
                *verdict([run.unfairness for run in its], most=3 if entrant is HEADRACE else None),
            )

    def profile(self) -> None:
        spy = py_spy()
        if spy is None:
            print("\nThe profile is left out: there is no py-spy.", flush=True)
            return
        server = self._servers[HEADRACE.server]
        self.present([HEADRACE])

        def load(seconds: int) -> Run:
            return wrk(server, HEADRACE.path, 16, seconds)

        with own_core(server) as web:
            cpu_us = load(SECONDS).web_cpu_us
            stacks = sampled(spy, web, load, max(2 * SECONDS, 3))
        heading("One request in the web process, piece by piece")
        print(
            f"{cpu_us:.0f} µs of CPU, on a core of its own, at 16 connections; {sum(n for _, n in stacks):,} samples.\n"
        )
        for title, counted_as, smallest in (("whose code runs", owner, 0.005), ("piece", piece, 0.01)):
            row(title, "µs", "%")
            row("---", "---:", "---:")
            for name, share in shares(stacks, counted_as, smallest):
                row(name, f"{share * cpu_us:.1f}", f"{share * 100:.1f}")
            print()


def chosen() -> list[str]:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.web")
    parser.add_argument(
        "--only", default=",".join(PARTS), help="parts to measure, with commas between (all: %(default)s)"
    )
    parts: list[str] = parser.parse_args().only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return parts


def main() -> None:
    parts = chosen()
    find_wrk()
    signal.signal(signal.SIGTERM, end)
    begun = time.monotonic()
    entrants = list(dict.fromkeys(entrant for part in PARTS if part in parts for entrant in PARTS[part]))
    mosec = environment(*MOSEC) if MOSEC_PEER in entrants else None
    with contextlib.ExitStack() as ends:
        servers = {
            name: ends.enter_context(running(name, mosec))
            for name in dict.fromkeys(entrant.server for entrant in entrants)
            if mosec is not None or not name.startswith("mosec")
        }
        comparison = Comparison(servers)
        if together := [part for part in TOGETHER if part in parts]:
            meeting = list(dict.fromkeys(entrant for part in together for entrant in PARTS[part]))
            for connections in (16, 64):
                comparison.throughput(meeting, connections, SCORE)
        if "alone" in parts:
            comparison.throughput(PARTS["alone"], 1, ALONE)
        if "fairness" in parts:
            comparison.fairness()
        if "profile" in parts:
            comparison.profile()
    print(f"\n{len(os.sched_getaffinity(0))} processors; {ROUNDS} rounds of {SECONDS} s, in all ", end="")
    print(f"{time.monotonic() - begun:.0f} s.", end="")
    if others := comparison.others:
        print(f" Others kept {median(others):.2f} processors busy meanwhile, at most {max(others):.2f}.", end="")
    print()
    if comparison.errors:
        sys.exit(f"{comparison.errors} requests were not answered as they should have been")


if __name__ == "__main__":
    main()

"""Where a web process's microseconds go: its stacks, sampled under load, as a table of pieces.

A sample belongs to the function of ours (`service/`, `workers/`) that is nearest to the end of its stack, and to what
that function was in: a system call, a module of somebody else's, or nothing but itself. Samples are of moments in which
the process could run. Those are the moments in which it does run if nobody takes its core from it, which would happen
most of all in the calls that wake somebody up; so it gets a core of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.bench.load import GRACE_S
from tests.bench.servers import ROOT, Server, processes

SAMPLES_A_SECOND = 500
ELSEWHERE = "outside our code"

_OURS = (str(ROOT / "service") + "/", str(ROOT / "workers") + "/")
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
# Calls that are, but for a few instructions, the system call of that name: a stack of Python's frames does not show it,
# but the line on which the last frame stands does. `read` and `write` are also those of files in memory.
_SYSTEM_CALL = re.compile(
    r"\bos\.(read|write|sendfile)\(|"
    r"(?:\b|_)(recv|recv_into|recvmsg|send|sendmsg|readv|writev|poll|accept4?|eventfd_read|eventfd_write)\("
)


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int

    @property
    def ours(self) -> bool:
        return self.file.startswith(_OURS)

    @property
    def module(self) -> str:
        path = self.file.removeprefix(str(ROOT) + "/")
        path = re.sub(r".*/(site-packages|python3\.\d+)/", "", path)
        return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"

    @property
    def system_call(self) -> str | None:
        text = source_line(self.file, self.line)
        if text.lstrip().startswith("def "):  # it has just been entered
            return None
        found = _SYSTEM_CALL.search(text)
        return (found[1] or found[2]) if found else None

    @property
    def package(self) -> str:
        """Whose code it is."""
        if "/site-packages/" in self.file:
            return self.file.partition("/site-packages/")[2].partition("/")[0].removesuffix(".py")
        return self.module.partition(".")[0] if self.ours else "standard library"


@cache
def source_lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return []


def source_line(file: str, line: int) -> str:
    lines = source_lines(file)
    return lines[line - 1] if 0 < line <= len(lines) else ""


@contextlib.contextmanager
def own_core(server: Server) -> Iterator[int]:
    """The web process alone on one core; all else of ours on the others. With a single core nothing changes."""
    web, before = server.web(), os.sched_getaffinity(0)
    if web is None:
        raise LookupError(f"{server.name} has no web process")
    core = {max(before)}
    others = before - core or before
    everyone = [pid for pid in processes(server.directory) if pid != web]
    try:
        for pid in (0, *everyone):
            os.sched_setaffinity(pid, others)
        os.sched_setaffinity(web, core)
        yield web
    finally:
        for pid in (0, web, *everyone):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, before)


def sampled(spy: str, web: int, load: Callable[[int], object], seconds: int) -> list[tuple[list[Frame], int]]:
    """Stacks of the web process while `load` runs for so many seconds, outermost frame first, and how often each was
    seen."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(1) as beside:
        raw = Path(directory, "raw")
        loaded = beside.submit(load, seconds + 2)
        command = [spy, "record", "-f", "raw", "-r", str(SAMPLES_A_SECOND), "-d", str(seconds), "--full-filenames"]
        subprocess.run(
            [*command, "-o", str(raw), "-p", str(web)],
            check=True,
            capture_output=True,
            timeout=seconds + GRACE_S,
        )
        loaded.result()
        return [parsed(line) for line in raw.read_text().splitlines()]


def parsed(line: str) -> tuple[list[Frame], int]:
    stack, _, count = line.rpartition(" ")
    frames = [Frame(m[1], m[2], int(m[3])) for frame in stack.split(";") if (m := _FRAME.fullmatch(frame))]
    return frames, int(count)


def piece(stack: list[Frame]) -> str:
    """What a sample is counted as."""
    at = next((i for i in reversed(range(len(stack))) if stack[i].ours), -1)
    name = stack[at].name if at >= 0 else ELSEWHERE
    call = stack[-1].system_call if stack else None
    if call is not None:
        return f"{name} → `{call}`"
    beyond = stack[at + 1 :]
    return f"{name} → {beyond[0].module if at >= 0 else beyond[-1].name}" if beyond else name


def owner(stack: list[Frame]) -> str:
    """Whose code a sample was taken in, or that it was in a system call."""
    call = stack[-1].system_call if stack else None
    return f"`{call}`" if call is not None else stack[-1].package if stack else "unknown"


def shares(
    stacks: Iterable[tuple[list[Frame], int]], counted_as: Callable[[list[Frame]], str], smallest: float
) -> list[tuple[str, float]]:
    """What samples are counted as, and its part of the whole, the largest first; what is small is one at the end."""
    counts: Counter[str] = Counter()
    for stack, count in stacks:
        counts[counted_as(stack)] += count
    total = counts.total()
    large = [(name, count / total) for name, count in counts.most_common() if count >= smallest * total]
    return [*large, ("what is smaller, together", 1 - sum(share for _, share in large))]

"""Starts that cannot work end in one clear line; starts and kills, over and over, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.clients import TAG, tagging
from tests.e2e.stack import (
    APP,
    SCORE,
    ZOO,
    Models,
    Stack,
    ask,
    end_all,
    environment,
    fds,
    kill,
    place,
    service,
    titles,
)
from tests.lengths import ROUNDS
from tests.service.serving import PATIENCE_S, start, until

GROUPS = Path("/sys/fs/cgroup/memory")


def failed_start(
    directory: Path,
    models: Models | None = None,
    arena: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    into: Callable[[int], None] | None = None,
) -> str:
    """The one line of a start that must fail, soon, with a code that says so, and leaving nothing."""
    environ = environment(directory, models, arena) | dict(env or {})
    began = time.monotonic()
    with start(APP, workers=2, env=environ, cwd=directory, stderr=subprocess.PIPE) as process:
        if into is not None:
            into(process.pid)
        try:
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            end_all(directory)
        assert process.returncode not in (0, None)
    assert time.monotonic() - began < 3
    assert titles(directory) == {}
    assert list((directory / "run").iterdir()) == []
    (line,) = stderr.decode().splitlines()
    return line


# Refusals


def test_an_arena_larger_than_the_machine_is_refused_with_figures() -> None:
    slots = [[1 << 30, 512]]
    with place() as directory:
        line = failed_start(directory, {"score": SCORE}, {"slots": slots})
    needed, available = figures(line)
    assert needed >= 2 * (512 << 30)
    assert 0 < available < needed


def figures(line: str) -> tuple[int, int]:
    """The bytes that are needed and those that are available."""
    found = re.fullmatch(r"Error: shared memory of (\d+) bytes is needed .*and (\d+) bytes are available", line)
    assert found is not None, line
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A memory control group with a limit, of whichever version there is."""
    root = GROUPS if GROUPS.is_dir() else Path("/sys/fs/cgroup")
    group = root / f"headrace-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if root == GROUPS else "memory.max")).write_text(str(limit))
        yield group
    finally:
        until(lambda: (group / "cgroup.procs").read_text() == "", "the group is empty")
        group.rmdir()


def can_limit_memory() -> bool:
    try:
        with memory_group(1 << 30):
            return True
    except OSError:
        return False


def enter(group: Path, pid: int) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def test_a_control_group_too_small_for_the_arenas_is_refused_with_figures() -> None:
    if not can_limit_memory():
        return  # only where control groups may be made; the other test of memory runs everywhere
    limit = 128 << 20
    with place() as directory, memory_group(limit) as group:
        line = failed_start(
            directory,
            {"score": SCORE},
            {"slots": [[4096, 32768]]},
            into=lambda pid: enter(group, pid),
        )
    needed, available = figures(line)
    assert needed >= 2 * (128 << 20)
    assert 0 <= available < limit


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HEADRACE_BIDN", "127.0.0.1:0", "HEADRACE_BIDN"),
        ("HEADRACE_WEB_WORKERS", "two", "HEADRACE_WEB_WORKERS must be a whole number, not 'two'"),
        ("HEADRACE_WEB_WORKERS", "0", "HEADRACE_WEB_WORKERS must be a whole number above 0, not '0'"),
        ("HEADRACE_BODY_TIMEOUT", "nan", "HEADRACE_BODY_TIMEOUT"),
        ("HEADRACE_CONFIG", "/nonexistent/models.toml", "/nonexistent/models.toml"),
        ("HEADRACE_RUNTIME_DIR", "/nonexistent", "/nonexistent"),
        ("HEADRACE_RUNTIME_DIR", "/proc", "/proc"),
        ("HEADRACE_RUNTIME_DIR", "/tmp/" + "x" * 120, "x" * 120),
    ],
)
def test_a_setting_that_cannot_be_is_named(name: str, value: str, said: str) -> None:
    with place() as directory:
        assert said in failed_start(directory, env={name: value})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.score\n", "models.toml"),
        ("[models.score]\nmodle = 'a:B'\n", "modle"),
        ("[models.score]\nmodel = 'a:B'\nreplicas = 'two'\n", "replicas"),
        ("[models.score]\nreplicas = 2\n", "model"),
        ("[arena]\nslots = [[5, 5]]\n", "slots"),
    ],
)
def test_a_configuration_that_cannot_be_is_named(text: str, said: str) -> None:
    with place() as directory:
        path = directory / "models.toml"
        path.write_text(text)
        assert said in failed_start(directory, env={"HEADRACE_CONFIG": str(path)})


def test_a_model_that_does_not_exist_is_told_by_ready() -> None:
    with service({"gone": {"model": "no.such:Thing"}, "score": SCORE}, web=1, ready=False) as stack:
        with stack.connect() as client:
            until(lambda: b"No module named 'no'" in ask(client, "/ready")[2], "the reason")
        until(lambda: stack.post("/score", b'{"features":[1,2,3,4]}')[0] == 200, "the rest serves")


# Over and over


def test_starts_and_stops_leave_nothing_behind() -> None:
    with place() as directory:
        for _ in range(ROUNDS):
            with service({"tag": TAG}, directory=directory) as stack:
                assert stack.predict("tag", nonce=4)[0] == 200
                memory = memory_files(stack.titles())
                assert memory
                stack.process.terminate()
                assert stack.wait() == 0
                stack.assert_nothing_left()
                assert not all_memory_files() & set(memory)


def test_killing_everything_over_and_over_leaves_nothing_for_long() -> None:
    with place() as directory:
        run = directory / "run"
        foreign = [f"headrace-{os.getuid()}-notes.txt", "other-service", f"headrace-{os.getuid() + 1}-1-x"]
        decoys = [run / name for name in foreign]
        decoys[0].write_text("mine")
        for decoy in decoys[1:]:
            decoy.mkdir()
            (decoy / "file").write_text("mine")
        for _ in range(ROUNDS):
            with service({"tag": TAG}, directory=directory) as stack, tagging(stack, 4) as clients:
                until(lambda clients=clients: clients.right > 20, "load")  # type: ignore[misc]
                # One directory of this start; that of the last has been swept.
                assert len(stack.runtime()) == len(decoys) + 1
                memory = memory_files(stack.titles())
                clients.stopping = True
                clients.killed = dict.fromkeys(stack.web(), time.monotonic())
                clients.tolerated = lambda code: code == "POOL_LOST"
                for pid in stack.titles():
                    kill(pid)
                stack.process.wait()
                stack.wait_gone()
                assert not all_memory_files() & set(memory)
        with service({"tag": TAG}, directory=directory) as stack:
            assert len(stack.runtime()) == len(decoys) + 1
        assert [decoys[0].read_text(), *((decoy / "file").read_text() for decoy in decoys[1:])] == ["mine"] * 3
        assert sorted(run.iterdir()) == sorted(decoys)


def test_a_service_in_use_keeps_its_descriptors_and_its_memory() -> None:
    with service({"tag": {**TAG, "replicas": 1}, "echo": {"model": ZOO + "Echo"}}, web=1) as stack:
        resting = len(memory_files(stack.titles()))
        large = [0.5] * 200_000

        def use() -> None:
            for _ in range(6):
                assert stack.predict("echo", x=large)[0] == 200  # in and out through memory files of their own
                assert stack.predict("tag", nonce=1)[0] == 200

        def held() -> dict[int, int]:
            return {pid: fds(pid) for pid in stack.titles()}

        use()
        # The last memory files are given back a moment after their answers.
        until(lambda: len(memory_files(stack.titles())) == resting, "it rests")
        before, memory = held(), memory_files(stack.titles())
        use()
        until(lambda: memory_files(stack.titles()) == memory, "no memory file is kept")
        until(lambda: all(count <= before[pid] for pid, count in held().items()), f"nothing is kept of {before}")


def memory_files(pids: Iterable[int]) -> dict[int, int]:
    """The memory files that processes hold: inodes, and sizes in bytes."""
    files = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("/memfd:headrace"):
                        status = os.stat(f"/proc/{pid}/fd/{fd}")
                        files[status.st_ino] = status.st_size
    return files


def all_memory_files() -> set[int]:
    return set(memory_files(int(entry) for entry in os.listdir("/proc") if entry.isdigit()))


def test_few_descriptors_are_refusals_and_not_the_end() -> None:
    with service({"tag": TAG}, web=1) as stack:
        (web,) = stack.web()
        resource.prlimit(web, resource.RLIMIT_NOFILE, (fds(web) + 20, 4096))
        with contextlib.ExitStack() as many:
            for _ in range(60):
                many.enter_context(stack.connect())
            until(lambda: "cannot accept connections" in stack.log(), "the limit is met")
        until(lambda: answers(stack), "it serves again")
        assert stack.web() == [web]
        assert stack.log().count("cannot accept connections") < 10


def answers(stack: Stack) -> bool:
    try:
        return stack.predict("tag", nonce=1)[0] == 200
    except OSError:
        return False


def test_the_port_is_taken_by_one_service_only() -> None:
    with service({"tag": TAG}) as stack, place() as directory:
        environ = environment(directory, {"tag": TAG})
        with tempfile.TemporaryFile() as stderr:
            process = start(APP, env=environ, cwd=directory, stderr=stderr, port=stack.port)
            with process:
                assert process.wait(PATIENCE_S) == 1
            line = os.pread(stderr.fileno(), 9999, 0).decode()
        assert line == f"Error: cannot listen on 127.0.0.1:{stack.port}: Address already in use\n"
        assert list((directory / "run").iterdir()) == []
        assert stack.predict("tag", nonce=1)[0] == 200
        stack.signal(signal.SIGTERM)
        assert stack.wait() == 0

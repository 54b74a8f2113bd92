"""Starting the pool beside a web server: its lock files, its directory, and how often it is tried."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.pools import ROOT, forked, until
from workers import launch


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to do what `code` says."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


LOOK = """
import sys
from pathlib import Path
from workers import launch
path = Path(sys.argv[1])
print("begun", flush=True)
while True:
    launch.locked(path)
"""
SWEEP = """
import sys
from pathlib import Path
from workers import launch
root = Path(sys.argv[1])
print("begun", flush=True)
while True:
    launch._sweep(root, "headrace-")
"""


def test_a_lock_is_held_until_the_last_process_that_has_it_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert not launch.locked(path)
    fd = launch.lock(path)
    with forked():
        assert launch.locked(path) and launch.lock(path) == -1
        os.close(fd)
        assert launch.locked(path) and launch.lock(path) == -1
    assert not launch.locked(path)


def test_a_lock_that_others_look_at_can_be_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    os.close(launch.lock(path))
    with running(LOOK, str(path)), running(LOOK, str(path)):
        for _ in range(5000):
            fd = launch.lock(path)
            assert fd >= 0
            os.close(fd)


def test_a_directory_that_is_just_being_made_is_not_swept(tmp_path: Path) -> None:
    with running(SWEEP, str(tmp_path)), running(SWEEP, str(tmp_path)):
        for n in range(300):
            directory = tmp_path / f"headrace-{n}"
            directory.mkdir()
            embedded = launch.Embedded(directory, os.geteuid(), os.getegid())
            assert (directory / "owner.lock").exists()
            close(embedded)
    # What a sweeper left half-swept when it was ended passes for one just being made, until it is older.
    for directory in tmp_path.iterdir():
        os.utime(directory, (0, 0))
    launch._sweep(tmp_path, "headrace-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wait_s", "status", "lasted_s", "following"),
    [(1, 1, 0.5, 2), (2, 1, 0.5, 4), (8, 1, 0.5, 8), (8, 0, 0.5, 1), (8, -9, 0.5, 1), (4, 1, 300, 1)],
)
def test_a_pool_that_cannot_start_is_tried_more_and_more_rarely(
    wait_s: float, status: int, lasted_s: float, following: float
) -> None:
    assert launch.next_wait_s(wait_s, status, lasted_s) == following


def test_a_pool_that_fails_at_once_is_left_alone_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text("nonsense = 1")
    monkeypatch.setenv("HEADRACE_CONFIG", str(config))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    directory = tmp_path / "d"
    directory.mkdir()
    embedded = launch.Embedded(directory, os.geteuid(), os.getegid())
    starts: list[float] = []

    def started_thrice() -> bool:
        before = len(embedded._children)
        embedded.ensure()
        if len(embedded._children) > before:
            starts.append(time.monotonic())
        return len(starts) == 3

    until(started_thrice, "three starts")
    assert starts[1] - starts[0] > 0.9 and starts[2] - starts[1] > 1.9
    until(lambda: embedded._reap() or not embedded._children, "the last has ended")
    close(embedded)


def close(embedded: launch.Embedded) -> None:
    for fd in (embedded._owner, embedded._lifeline_read, embedded._lifeline_write):
        os.close(fd)

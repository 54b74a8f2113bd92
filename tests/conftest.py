"""What holds for every test: it leaves no descriptor, no thread and no process behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 10.0


class Held:
    """What this process holds right now."""

    def __init__(self) -> None:
        self.descriptors = Counter(_descriptors())
        self.threads = set(threading.enumerate())
        self.children = _children()

    def beyond(self, before: Held) -> list[str]:
        """What is held now and was not before, in words. What was there before may be gone, or stand for another."""
        surplus = sum(self.descriptors.values()) - sum(before.descriptors.values())
        found = [f"descriptor of {target}" for target in self.descriptors - before.descriptors] if surplus > 0 else []
        found += [f"thread {thread.name}" for thread in self.threads - before.threads]
        found += [f"process {pid}" for pid in self.children - before.children]
        return found


def pytest_collection_finish() -> None:
    """All that is loaded by now stays: the collector, which runs before each test, need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def hub() -> None:
    """Under gevent: what its hub opens at first use is there before anything is counted."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("socket"):
        import gevent

        gevent.get_hub().threadpool.apply(int)
        gevent.sleep(0)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    gc.collect()
    before = Held()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := _left(before):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(left)}")
        time.sleep(0.005)


def _left(before: Held) -> list[str]:
    left = Held().beyond(before)
    if left:
        # Something may hang on a cycle, an exception's traceback for one.
        gc.collect()
    return left


def _descriptors() -> list[str]:
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            # The listing's own descriptor.
            continue
    return targets


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids.update(int(pid) for pid in task.read_text().split())
        except OSError:
            # That thread has just ended.
            continue
    return pids

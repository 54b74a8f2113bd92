"""An arena: the shared memory of one web process, cut into slots of a few sizes.

It is a nameless memory file, so that the kernel frees it whatever is killed, reserved at start, so
that no write can meet a full machine later. The first page is the header; its words say how the rest is cut, so
that whoever is given the descriptor needs nothing else. Words are read and written only as aligned 8-byte items
of a `memoryview.cast("Q")`: single loads and stores, never torn.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from workers.errors import PoolError
from workers.tensors import Layout

HEADER_SIZE = 4096
MAGIC = 0x48524143_00000001
# Words of the header. `CHANGED` is the client's: another number each time it cancels a stream or grants to one, so
# that a worker need not look at every slot to see that nothing has changed.
_MAGIC, OVERFLOW, CLOSED, _CLASSES, CHANGED, _FIRST_CLASS = 0, 1, 2, 3, 4, 8
MAX_CLASSES = 16
STEP = 4 * 1024 * 1024
"""Bytes that are reserved, or copied, in one go by whoever must not keep others waiting."""


CLOSED_MAP = mmap.mmap(-1, 1)
CLOSED_MAP.close()
"""Takes the place of a mapping that is let go of: whoever looks there gets a `ValueError`."""


class NotEnoughMemory(PoolError):
    """The arena cannot be reserved; the text has the needed and the available bytes."""

    code = "OVERLOADED"


class Arena:
    """Mapped shared memory. `words[(bases[slot] >> 3) + WORD]` is a word of a slot, `sizes[slot]` its bytes,
    `cls[slot]` the number of its size.

    Made by its owner with `Arena.create(slots)`, by everyone else with `Arena(fd)`; both own `fd` and close it.
    """

    __slots__ = ("_views", "bases", "classes", "cls", "fd", "firsts", "map", "sizes", "view", "words")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        # A model that forks must not keep the memory of a web process alive.
        self.map.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self.map)
        self.words = self.view.cast("Q")
        if self.words[_MAGIC] != MAGIC:
            raise ValueError("not an arena of this version")
        self.classes: list[tuple[int, int, int]] = []
        self.bases: list[int] = []
        self.sizes: list[int] = []
        self.cls: list[int] = []
        self.firsts: list[int] = []
        for k in range(self.words[_CLASSES]):
            at = _FIRST_CLASS + 3 * k
            size, count, start = self.words[at], self.words[at + 1], self.words[at + 2]
            self.classes.append((size, count, start))
            self.firsts.append(len(self.bases))
            self.bases += [start + size * i for i in range(count)]
            self.sizes += [size] * count
            self.cls += [k] * count
        self._views: dict[tuple[int, int, bytes], list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]] = {}

    @classmethod
    def create(cls, slots: Sequence[tuple[int, int]]) -> Arena:
        """Reserve an arena of `slots`, pairs of (bytes, count), sizes ascending and multiples of 4096."""
        total = HEADER_SIZE + sum(size * count for size, count in slots)
        fd = reserve("headrace-arena", total)
        try:
            with mmap.mmap(fd, HEADER_SIZE) as header, memoryview(header) as view, view.cast("Q") as words:
                words[_CLASSES] = len(slots)
                start = HEADER_SIZE
                for k, (size, count) in enumerate(slots):
                    at = _FIRST_CLASS + 3 * k
                    words[at], words[at + 1], words[at + 2] = size, count, start
                    start += size * count
                words[_MAGIC] = MAGIC
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def class_views(self, k: int, at: int, layout: Layout) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
        """For each tensor of `layout` one array over every slot of class `k`: row i is that tensor of the i-th slot,
        for blocks that start `at` bytes into their slots. A whole batch is gathered or scattered by one index."""
        key = (k, at, layout.descriptor)
        views = self._views.get(key)
        if views is None:
            size, count, start = self.classes[k]
            views = [
                np.ndarray(
                    (count, *t.shape),
                    t.dtype,
                    self.map,
                    start + at + t.offset,
                    (size, *_c_strides(t.shape, t.dtype.itemsize)),
                )
                for t in layout.tensors
            ]
            if len(self._views) > 1024:
                self._views.clear()
            self._views[key] = views
        return views

    def announce(self, reply: int, frames: bytes) -> None:
        """Write whole frames, at most `FRAMES_PER_WRITE`, to `reply`, the pipe that the arena's client reads."""
        for _ in range(2):
            try:
                os.write(reply, frames)
                return
            except BlockingIOError:
                # The client will scan its slots. The mark goes up before the second try: if the pipe was
                # emptied in between, that try gets through and wakes the client, which then sees the mark.
                self.words[OVERFLOW] = 1
            except BrokenPipeError:
                return

    def close(self) -> None:
        """Let go of the memory; it is unmapped once nobody looks at it any more."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._views.clear()
        self.words.release()
        self.view.release()
        # Not closed: an array over it does not hinder that, and would then look at memory that is not there. Each
        # holds on to the mapping, and the last of them unmaps it.
        self.map = CLOSED_MAP


class Spill:
    """A one-off memory file: inputs that no slot holds on their way in, or outputs on their way out. It owns `fd`,
    also if it cannot be made for lack of memory or descriptors (`OSError`)."""

    __slots__ = ("fd", "id", "map")

    def __init__(self, spill_id: int, fd: int) -> None:
        self.id = spill_id
        self.fd = fd
        try:
            self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        # If views are still out, the last of them unmaps it.
        self.map = CLOSED_MAP
        if fd >= 0:
            os.close(fd)


def no_pause() -> None: ...


def reserve(name: str, size: int, pause: Callable[[], object] = no_pause) -> int:
    """A memory file of `size` bytes that are taken now, so that no write to it finds the machine full later; they are
    zeros, and mapped nowhere yet. `NotEnoughMemory` if they, or a descriptor, are not to be had.

    `pause` is called between two steps; what it raises gives everything back.
    """
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        for start in range(0, size, STEP):
            if start:
                pause()
            # Others may have taken some meanwhile: beyond the limit of a control group nothing fails, but is killed.
            available = available_bytes()
            if size - start > available:
                available += start
                raise NotEnoughMemory(f"shared memory of {size} bytes is needed and {available} bytes are available")
            os.posix_fallocate(fd, start, min(STEP, size - start))
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise NotEnoughMemory(
            f"shared memory of {size} bytes is needed and could not be reserved: {error.strerror}"
        ) from None
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def copy_in(target: mmap.mmap | memoryview, at: int, body: bytes | memoryview, pause: Callable[[], object]) -> None:
    """Copy `body` to byte `at` of `target`, with a pause between two steps."""
    view = memoryview(body)
    for start in range(0, len(view), STEP):
        if start:
            pause()
        piece = view[start : start + STEP]
        target[at + start : at + start + len(piece)] = piece


def copy_out(source: mmap.mmap, at: int, size: int, pause: Callable[[], object]) -> bytes:
    """A copy of `size` bytes from byte `at` on, with a pause between two steps."""
    if size <= STEP:
        return source[at : at + size]
    # Grown in place, and given away without another copy.
    copy = io.BytesIO()
    for start in range(0, size, STEP):
        if start:
            pause()
        copy.write(source[at + start : at + min(start + STEP, size)])
    return copy.getvalue()


def available_bytes() -> int:
    """Memory this process can still take: the machine's, and what is left in every control group above it."""
    with open("/proc/meminfo") as file:
        machine = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    return max(0, min([machine, *_left_in_control_groups()]))


def _left_in_control_groups() -> list[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, inactive = Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, used, inactive = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for level in (group, *group.parents):
            if not level.is_relative_to(root):
                break
            try:
                most = int((level / limit).read_text())
                taken = int((level / used).read_text())
                stat = dict(entry.split() for entry in (level / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                # No such file at the root, or the word "max": no limit at this level.
                continue
            left.append(most - taken + int(stat.get(inactive, 0)))
    return left


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))

"""Read-only arrays that every replica of a model maps: one memory file, made once, then sealed.

The arrays come first, each at a multiple of 64 bytes; the last 8 bytes of the file say how long the descriptor of
names, dtypes and shapes is that stands before them. So the file can be written before its contents are all known.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from struct import Struct

import numpy as np

from workers.arena import NotEnoughMemory, available_bytes
from workers.model import DTYPES, Array
from workers.tensors import align, describe, place, undescribe

_LENGTH = Struct("<Q")
_F_ADD_SEALS, _SEAL_ALL = 1033, 0x1 | 0x2 | 0x4 | 0x8  # sealing itself, shrinking, growing, writing


def build(arrays: Iterable[tuple[str, Array]]) -> int:
    """The descriptor of a sealed memory file of `arrays`, written one after the other, so that one of them at most
    is held twice. `NotEnoughMemory`; `ValueError` for a dtype that cannot be shared."""
    fd = os.memfd_create("headrace-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    sig = []
    offset = 0
    for name, array in arrays:
        if array.dtype.name not in DTYPES:
            raise ValueError(f"weights {name!r} are {array.dtype.name}, which is not one of {', '.join(DTYPES)}")
        if array.nbytes > (available := available_bytes()):
            raise NotEnoughMemory(f"weights {name!r} need {array.nbytes} bytes and {available} bytes are available")
        sig.append((name, array.dtype, array.shape))
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        offset = align(_write(fd, memoryview(little.reshape(-1).view(np.uint8).data), offset))
    descriptor = describe(tuple(sig))
    _write(fd, memoryview(descriptor + _LENGTH.pack(len(descriptor))), offset)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_ALL)
    return fd


def attach(fd: int) -> dict[str, Array]:
    """Read-only arrays over the file that `build` made. `fd` is closed."""
    memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    os.close(fd)
    end = len(memory) - _LENGTH.size
    (length,) = _LENGTH.unpack_from(memory, end)
    tensors, _ = place(undescribe(memory[end - length : end]), 0)
    return {t.name: np.ndarray(t.shape, t.dtype, memory, t.offset) for t in tensors}


def _write(fd: int, data: memoryview, offset: int) -> int:
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written
    return offset

"""How a compute process begins: it takes its place under the pool, makes its model, warms it up, and works.

Runs in a process that `multiprocess` has spawned, so nothing of the pool but this assignment is in it. BLAS and
OpenMP have read their thread counts from the environment before this module could be imported: the pool sets it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import mmap
import os
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import setproctitle

from workers import control
from workers.arena import NotEnoughMemory, available_bytes
from workers.errors import Refused, code_of
from workers.inbox import Board, Inbox
from workers.log import start as start_log
from workers.model import DTYPES, Array, Model, SharesWeights, resolve
from workers.tensors import Tensor, align, check_outputs, describe, place, undescribe
from workers.worker import Worker

log = logging.getLogger("headrace.worker")

_PR_SET_PDEATHSIG = 1
_F_ADD_SEALS, _SEAL_ALL = 1033, 0x1 | 0x2 | 0x4 | 0x8  # sealing itself, shrinking, growing, writing


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a compute process is told. `link`: its end of the control socket, as a `multiprocess` connection."""

    model: str | type[Model]
    name: str
    index: int
    options: Mapping[str, object]
    link: Any
    pool_pid: int
    max_delay_ns: int
    spill_limit: int


def main(assignment: Assignment) -> None:
    """Everything a compute process does, from its birth to its end."""
    _take_place(assignment)
    link = socket.socket(fileno=os.dup(assignment.link.fileno()))
    assignment.link.close()
    equip = control.receive(link)
    if equip is None:
        return
    queue, inbox, board = equip[1]
    model = _make_model(assignment, link)
    if model is None:
        return
    # What loading has left is there to stay: no collection during a task need look at it.
    gc.collect()
    gc.freeze()
    control.send(link, control.Loaded(tuple(model.inputs), tuple(model.outputs)))
    Worker(
        model,
        queue,
        Inbox(inbox),
        Board(board),
        link,
        assignment.index,
        assignment.max_delay_ns,
        assignment.spill_limit,
    ).serve()


def _take_place(assignment: Assignment) -> None:
    # A terminal's Ctrl-C or a unit's TERM is for the web server and the pool; this process obeys its control socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # A group of its own, so that whatever the model starts can be ended with it.
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != assignment.pool_pid:
        os._exit(0)
    setproctitle.setproctitle(f"headrace worker {assignment.name}[{assignment.index}]")
    try:
        # When memory runs out, the process that computes is the one to lose, not one that holds connections.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
    except OSError:
        pass
    start_log(f"%(asctime)s %(levelname)s {assignment.name}[{assignment.index}] %(message)s")


def _make_model(assignment: Assignment, link: socket.socket) -> Model | None:
    """The model, loaded and warmed up; None when it cannot serve, which the pool has then been told."""
    try:
        cls = resolve(assignment.model) if isinstance(assignment.model, str) else assignment.model
        model = cls(**assignment.options)
        if isinstance(model, SharesWeights):
            model.attach(_shared_weights(model, link))
        model.load()
        warm_up(model)
    except Refused as refusal:
        control.send(link, control.LoadFailed(str(refusal)[:1000], code_of(refusal)))
    except (Exception, SystemExit) as error:
        log.error("the model cannot be loaded", exc_info=error)
        control.send(link, control.LoadFailed(f"{type(error).__name__}: {error}"[:1000], ""))
    else:
        return model
    return None


def warm_up(model: Model) -> None:
    """Run one row of zeros through the model and hold the answer against its declaration."""
    batch: dict[str, Array] = {spec.name: spec.zeros(1) for spec in model.inputs}
    for array in batch.values():
        array.flags.writeable = False
    check_outputs(tuple(model.outputs), model.predict(batch), 1)


def _shared_weights(model: SharesWeights, link: socket.socket) -> dict[str, Array]:
    """The model's weights in shared memory: made here if no replica has made them yet."""
    control.send(link, control.NeedWeights())
    answer = _wait_for_weights(link)
    if isinstance(answer[0], control.BuildWeights):
        fd, descriptor = _build_weights(model.weights())
        control.send(link, control.BuiltWeights(descriptor), [fd])
        os.close(fd)
        answer = _wait_for_weights(link)
    message, fds = answer
    assert isinstance(message, control.Weights)
    tensors, size = place(undescribe(message.descriptor), 0)
    return map_weights(fds[0], tensors, size)


def _wait_for_weights(link: socket.socket) -> tuple[control.Message, list[int]]:
    heard = control.receive(link)
    if heard is None or isinstance(heard[0], control.Stop):
        os._exit(0)
    return heard


def _build_weights(arrays: Iterable[tuple[str, Array]]) -> tuple[int, str]:
    """Write the arrays into a memory file one after the other (so that one copy at most is held besides), then
    seal it: nobody can change it any more. Its descriptor and that of its layout."""
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
        data = memoryview(little.reshape(-1).view(np.uint8).data)
        while data:
            written = os.pwrite(fd, data, offset)
            data = data[written:]
            offset += written
        offset = align(offset)
    os.ftruncate(fd, max(offset, 1))
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_ALL)
    return fd, describe(tuple(sig)).decode()


def map_weights(fd: int, tensors: tuple[Tensor, ...], size: int) -> dict[str, Array]:
    """Read-only arrays over the memory file, which is closed."""
    memory = mmap.mmap(fd, max(size, 1), prot=mmap.PROT_READ)
    os.close(fd)
    return {t.name: np.ndarray(t.shape, t.dtype, memory, t.offset) for t in tensors}

"""How a compute process begins: it takes its place under the pool, makes its model, warms it up, and works.

Runs in a process that `multiprocess` has spawned, so nothing of the pool but this assignment is in it. BLAS and
OpenMP have read their thread counts from the environment before this module could be imported: the pool sets it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import setproctitle

from workers import control, weights
from workers.errors import Refused, code_of
from workers.inbox import Board, Inbox
from workers.log import start as start_log
from workers.model import (
    Array,
    Iterates,
    Last,
    Model,
    Predicts,
    SharesWeights,
    Steps,
    Stops,
    answers_of,
    pieces_of,
    resolve,
    to_bytes,
)
from workers.tensors import check_outputs
from workers.worker import Worker

log = logging.getLogger("headrace.worker")

_PR_SET_PDEATHSIG = 1
WITHOUT_PIECES_S = 1.0  # steps that answer nothing yet are a model that works


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
    predicts, streams = isinstance(model, Predicts), isinstance(model, Steps | Iterates)
    control.send(link, control.Loaded(tuple(model.inputs), tuple(model.outputs), predicts, streams))
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
    """Run one row of zeros through the model: a prediction, held against its declaration, and a stream, of steps up to
    its first piece, or for a second in which it has none; whichever it has."""
    batch: dict[str, Array] = {spec.name: spec.zeros(1) for spec in model.inputs}
    for array in batch.values():
        array.flags.writeable = False
    if isinstance(model, Predicts):
        check_outputs(tuple(model.outputs), model.predict(batch), 1)
    request = {name: rows[0, ...] for name, rows in batch.items()}
    if isinstance(model, Steps):
        _warm_up_steps(model, request)
    elif isinstance(model, Iterates):
        iterator = pieces_of(model.stream(request))
        try:
            any(map(to_bytes, iterator))
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
    elif not isinstance(model, Predicts):
        raise TypeError("the model has neither `predict` nor `stream` nor `start` and `step`")


def _warm_up_steps(model: Steps, request: Mapping[str, Array]) -> None:
    state = model.start(request)
    until = time.monotonic() + WITHOUT_PIECES_S
    try:
        answer: object = ""
        while answer in ("", b"") and time.monotonic() < until:
            (answer,) = answers_of(model.step((state,)), 1)
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                return
            to_bytes(answer.piece if isinstance(answer, Last) else answer)
    finally:
        if isinstance(model, Stops):
            model.stop(state)


def _shared_weights(model: SharesWeights, link: socket.socket) -> dict[str, Array]:
    """The model's weights in shared memory: made here if no replica has made them yet."""
    control.send(link, control.NeedWeights())
    message, fds = _wait_for_weights(link)
    if isinstance(message, control.BuildWeights):
        fd = weights.build(model.weights())
        control.send(link, control.BuiltWeights(), [fd])
        os.close(fd)
        message, fds = _wait_for_weights(link)
    return weights.attach(fds.pop())


def _wait_for_weights(link: socket.socket) -> tuple[control.Message, list[int]]:
    heard = control.receive(link)
    if heard is None:
        os._exit(0)
    return heard

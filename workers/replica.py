"""One compute process as the pool sees it: spawned, equipped, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from typing import Any

import multiprocess
from multiprocess import process as started
from multiprocess.connection import Connection

from workers import control, startup
from workers.config import ModelConfig
from workers.inbox import BUSY_SINCE, FINISHED, TURNS, Board, Inbox

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_spawn: Any = multiprocess.get_context("spawn")


class Replica:
    """The `index`-th process of a model. `queue`: a read end of the model's queue, of which it gets its own.

    Must be made on the pool's main thread: the signal that ends the process with its parent follows the thread.
    """

    def __init__(self, config: ModelConfig, index: int, queue: int, board: Board, spill_limit: int) -> None:
        self.index = index
        self.started = time.monotonic()
        self.ready = False
        self.silent = False
        self._turns = 0
        self._idle_since = self.started
        self.killed = False
        self.failed: control.LoadFailed | None = None
        self.forwarded: deque[tuple[int, int, int]] = deque(maxlen=max(64, config.max_batch))
        """(arena, slot, seq) of outputs sent on in a memory file: their tasks are answered."""
        with contextlib.ExitStack() as undo:
            # Descriptors, memory or processes may run out half-way.
            self.inbox = Inbox.create(config.max_batch, config.max_streams)
            undo.callback(self.inbox.close)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.link = control.Link(ours)
            undo.callback(self.link.close)
            # In this wrapping `multiprocess` passes the descriptor on to the new process.
            with Connection(theirs.detach()) as link:
                assignment = startup.Assignment(
                    config.model,
                    config.name,
                    index,
                    config.options,
                    link,
                    os.getpid(),
                    int(config.max_delay_ms * 1e6),
                    spill_limit,
                )
                for name in THREAD_VARIABLES:
                    os.environ[name] = str(config.threads)
                self._process = _spawn.Process(target=startup.main, args=(assignment,))
                self._process.start()
            # `multiprocess` reaps what has ended whenever it starts another; then the id would not be ours any more.
            started._children.discard(self._process)
            self.pid: int = self._process.pid
            undo.callback(self._give_up)
            self.pidfd = os.pidfd_open(self.pid)
            undo.callback(os.close, self.pidfd)
            self._equip(queue, board)
            undo.pop_all()

    def _equip(self, queue: int, board: Board) -> None:
        fds: list[int] = []
        try:
            fds.append(control.reopen(queue, os.O_RDONLY | os.O_NONBLOCK))
            fds.append(os.dup(self.inbox.fd))
            fds.append(os.dup(board.fd))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        self.link.send(control.Equip(), fds)

    def _give_up(self) -> None:
        self.kill()
        self._process.join()
        self._process.close()

    @property
    def busy_since_ns(self) -> int:
        """Since when it has been running one batch, in monotonic nanoseconds; 0 when it is not."""
        return self.inbox.words[BUSY_SINCE]

    def idles(self, now: float, queued: bool) -> float:
        """For how many seconds it has let records lie and not run any. Ask at every tick."""
        turns = self.inbox.words[TURNS]
        if not queued or self.busy_since_ns or turns != self._turns:
            self._turns = turns
            self._idle_since = now
        return now - self._idle_since

    def excuse(self, now: float) -> None:
        """Nobody has looked for a while: what it has left undone meanwhile is not held against it."""
        self._idle_since = now

    @property
    def productive(self) -> bool:
        """It has finished at least one task."""
        return self.inbox.words[FINISHED] > 0

    def kill(self) -> None:
        """End it and whatever its model has started; `reap` follows when its end is seen."""
        if self.killed:
            return
        self.killed = True
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has not got as far as making its group, or has ended this moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Collect the process, which has ended; how it did."""
        # What the model left running goes first, while the unreaped process still pins the id.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        if code is None:
            return "ended"
        if code >= 0:
            return f"exited with code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"

    def close(self) -> None:
        """Give up what the pool holds of it, once its inbox has been gone through."""
        os.close(self.pidfd)
        self.link.close()
        self.inbox.close()

"""What the pool, its clients and its workers say to each other outside the request path.

One message is one packet of a Unix SOCK_SEQPACKET socket: JSON text `["Name", {fields}]`, with the descriptors
that go with it. Only the pool listens, in a private directory, and only for its own user.

    client and pool    Welcome → Register → Status, Queue … Settled; Status at every change; Spill, DropSpill;
                       SpilledTo; CloseQueues → QueuesClosed
    pool and worker    Equip, → NeedWeights → BuildWeights → BuiltWeights → Weights, → Loaded or LoadFailed,
                       → NeedArena → ArenaIs or ArenaDead; DropArena; Spilled →
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import socket
import termios
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from struct import Struct
from typing import Any

from workers.model import TensorSpec
from workers.records import RECORD_SIZE
from workers.status import ModelStatus, State

MAX_PACKET = 128 * 1024
MAX_FDS = 8
_COUNT = Struct("i")
_NO_COUNT = bytes(_COUNT.size)
_LATER = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""What the system may be short of for a moment: too many descriptors on their way, no memory."""
NONSENSE = (LookupError, TypeError, ValueError, RecursionError, OSError)
"""What hearing and heeding the other side can raise when it speaks nonsense, or when descriptors have run out."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Pool to client, on connecting. `clock_ns`: the pool's monotonic clock; `slots`: pairs of (bytes, count)."""

    arena: int
    slots: tuple[tuple[int, int], ...]
    spill_limit: int
    clock_ns: int


@dataclass(frozen=True, slots=True)
class Register:
    """Client to pool, with the arena and the write end of the reply pipe."""

    pid: int


@dataclass(frozen=True, slots=True)
class Queue:
    """Pool to client, with the write end of a model's queue."""

    model: str


@dataclass(frozen=True, slots=True)
class Status:
    model: ModelStatus


@dataclass(frozen=True, slots=True)
class Settled:
    """Pool to client: every model and queue has been named once."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Client to pool, with a memory file that holds the inputs of one task."""

    spill: int


@dataclass(frozen=True, slots=True)
class DropSpill:
    spill: int


@dataclass(frozen=True, slots=True)
class SpilledTo:
    """Pool to client, with a memory file that holds the outputs of one task."""

    slot: int
    seq: int


@dataclass(frozen=True, slots=True)
class CloseQueues:
    """Pool to client: write no more records, close every queue, say so."""


@dataclass(frozen=True, slots=True)
class QueuesClosed:
    pass


@dataclass(frozen=True, slots=True)
class Equip:
    """Pool to worker, with the read end of the queue, the inbox and the model's board."""


@dataclass(frozen=True, slots=True)
class NeedWeights:
    pass


@dataclass(frozen=True, slots=True)
class BuildWeights:
    """Pool to worker: nobody has them yet; you make them."""


@dataclass(frozen=True, slots=True)
class BuiltWeights:
    """Worker to pool, with the memory file, which says itself how it is laid out."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Pool to worker, with the memory file."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Worker to pool: the model has loaded and is warm. `predicts`, `streams`: what it can be asked for."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    predicts: bool
    streams: bool


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """`code`: the code name of a refusal, else empty."""

    reason: str
    code: str


@dataclass(frozen=True, slots=True)
class NeedArena:
    """Worker to pool. `memory`: the id of an arena or of an input spill that it meets for the first time."""

    memory: int


@dataclass(frozen=True, slots=True)
class ArenaIs:
    """With the memory, and for an arena (not a spill) the write end of its reply pipe."""

    memory: int


@dataclass(frozen=True, slots=True)
class ArenaDead:
    """Pool to worker: whoever owned that memory is gone, or has no more use for it."""

    memory: int


@dataclass(frozen=True, slots=True)
class DropArena:
    arena: int


@dataclass(frozen=True, slots=True)
class Spilled:
    """Worker to pool, with a memory file that holds the outputs of one task."""

    arena: int
    slot: int
    seq: int


Message = (
    Welcome
    | Register
    | Queue
    | Status
    | Settled
    | Spill
    | DropSpill
    | SpilledTo
    | CloseQueues
    | QueuesClosed
    | Equip
    | NeedWeights
    | BuildWeights
    | BuiltWeights
    | Weights
    | Loaded
    | LoadFailed
    | NeedArena
    | ArenaIs
    | ArenaDead
    | DropArena
    | Spilled
)
_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in Message.__args__}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)], separators=(",", ":")).encode()


def decode(packet: bytes) -> Message:
    name, values = json.loads(packet)
    cls = _CLASSES[name]
    message: Message = cls(**{f.name: _field(f.name, values[f.name]) for f in fields(cls)})
    return message


def _field(name: str, value: Any) -> Any:
    if name == "model" and isinstance(value, dict):
        specs = {side: _specs(value[side]) for side in ("inputs", "outputs")}
        return ModelStatus(**{**value, **specs, "state": State(value["state"])})
    if name in ("inputs", "outputs"):
        return _specs(value)
    if name == "slots":
        return tuple((size, count) for size, count in value)
    return value


def _specs(values: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(v["name"], v["dtype"], tuple(v["shape"])) for v in values)


def send(sock: socket.socket, message: Message, fds: list[int] | None = None) -> None:
    """One packet. `BlockingIOError` from a non-blocking socket whose other end does not read."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([encode(message)], ancillary)


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """One message and its descriptors, which are now ours; None when the other end is gone."""
    space = socket.CMSG_SPACE(MAX_FDS * 4)
    try:
        packet, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
    except (ConnectionResetError, BrokenPipeError):
        return None
    if not packet:
        return None
    received: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) // 4 * 4])
            received += numbers
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("a message came without all of its text or its descriptors")
        return decode(packet), received
    except BaseException:
        close_all(received)
        raise


def close_all(fds: list[int]) -> None:
    """Close what nobody took; whoever takes a descriptor that came with a message pops it from the list."""
    while fds:
        os.close(fds.pop())


def reopen(fd: int, flags: int) -> int:
    """A descriptor of the same pipe with flags of its own: flags belong to the open description, not to `fd`."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def queue_depth(queue: int) -> int:
    """How many records wait in a model's queue, of which `queue` is either end."""
    (size,) = _COUNT.unpack(fcntl.ioctl(queue, termios.FIONREAD, _NO_COUNT))
    return int(size) // RECORD_SIZE


class Link:
    """One end of a control socket that never blocks: what cannot be sent now waits its turn. Any thread may send.

    `fds` handed to `send` are closed here once they are on their way.
    """

    MOST_WAITING = 4096

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._waiting: deque[tuple[Message, list[int]]] = deque()
        self._sending = threading.Lock()

    def send(self, message: Message, fds: list[int] | None = None) -> bool:
        """True if it is on its way, and nothing waits."""
        with self._sending:
            self._waiting.append((message, fds or []))
            return self._flush()

    def flush(self) -> None:
        with self._sending:
            self._flush()

    def _flush(self) -> bool:
        while self._waiting:
            message, fds = self._waiting[0]
            try:
                send(self.sock, message, fds)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _LATER:
                    return False
                # The other end is gone; its end of file is dealt with where the socket is read.
            self._waiting.popleft()
            close_all(fds)
        return True

    @property
    def stuck(self) -> bool:
        """The other end has not read for so long that it is given up."""
        return len(self._waiting) > self.MOST_WAITING

    def receive(self) -> tuple[Message, list[int]] | None:
        """As `receive`; `BlockingIOError` when there is nothing."""
        return receive(self.sock)

    def hear(self, heed: Callable[[Message, list[int]], None]) -> bool:
        """Everything that the other end has said by now; false once it is gone. `heed` pops the descriptors that it
        takes, the others are closed. What is no message, or cannot be heeded, raises (`NONSENSE`): give the link up."""
        while True:
            try:
                heard = self.receive()
            except BlockingIOError:
                return True
            if heard is None:
                return False
            message, fds = heard
            try:
                heed(message, fds)
            finally:
                close_all(fds)

    def close(self) -> None:
        with self._sending:
            self._close()

    def forked(self) -> None:
        """Close it in a child of fork, where a thread that was just sending has left its lock locked for ever."""
        self._sending = threading.Lock()
        self._close()

    def _close(self) -> None:
        for _, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()
        self.sock.close()

"""The 64-byte record of a queue, the 16-byte frame of a reply pipe, and the words of a slot. No I/O.

A *record* stands for one task on its way to a worker. It is in exactly one place at any instant: a model's
queue (a kernel pipe), one worker's inbox (shared memory that `readv` fills), or answered. A *frame* tells the
client that a task has its outcome, or carries a piece of a stream, which follows its 16 bytes. Both name a slot and
the sequence number the slot was leased under; whoever finds another number there has met something stale and leaves
it alone.

The state word of a slot holds sequence number and state together, so that one 8-byte store changes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

RECORD = Struct("<QQQQQIHHII8x")
RECORD_SIZE = 64
RECORD_WORDS = RECORD_SIZE // 8
QUEUED_WORD, ROWS_WORD = 3, 6
"""Which words of a record hold when it was queued; its rows, and in the upper half whether it is a stream."""
FRAME = Struct("<QI4x")
"""A frame that nothing follows: word, slot."""
FRAME_SIZE = 16
PIECE_HEAD = Struct("<QII")
"""The head of a piece's frame: word, slot, and how many bytes of the piece follow."""
WRITE_SIZE = 4096
"""A write of up to so many bytes (PIPE_BUF) is atomic: it gets in whole or not at all, and those of several never
mix."""
RECORDS_PER_WRITE, FRAMES_PER_WRITE = WRITE_SIZE // RECORD_SIZE, WRITE_SIZE // FRAME_SIZE
PIECE_ROOM = WRITE_SIZE - FRAME_SIZE
"""Bytes of a piece that one frame carries at most."""
PIECE, PIECE_PART = 0x80, 0x81
"""In the low byte of a frame's word, where a final frame has its outcome: a piece, or the end of one; a part of a
piece that goes on in the next frame of its stream. No outcome is as high."""

assert RECORD.size == RECORD_SIZE and FRAME.size == PIECE_HEAD.size == FRAME_SIZE

# Words of a slot, in units of 8 bytes from its start. Each has one writer at a time: `STATE` follows the record
# (client, then worker, then client; the pool for a worker it has reaped, and for records that no worker takes any
# more), `CONTROL`, `INPUT` and `CREDIT` are the client's, `OUTPUT` is written with the outcome.
STATE, CONTROL, INPUT, OUTPUT, CREDIT = 0, 1, 2, 3, 4
SLOT_HEADER = 64
ERROR_ROOM = 1024
"""Bytes kept free in every slot behind the inputs, so that a failure's text always fits."""
CANCEL = 1

# What a stream may have sent is bounded by its reader. `CREDIT` is the sum of the costs of the pieces it may send, and
# grows as pieces are consumed; a piece is sent while less has been, so that one may overdraw, however long it is.
WINDOW = 16384
"""The credit of a new stream."""
PIECE_COST = 64
"""What a piece costs over its bytes."""


class SlotState(IntEnum):
    """The low byte of a state word; from `DONE` on it is an outcome.

    A stream that has begun stays `STREAMING` for good: how it ends is said by its final frame alone, which follows its
    pieces. For a word is seen at once, also by a client that looks because a frame was lost on a full pipe, and
    pieces that are still on their way would be lost with it.
    """

    QUEUED = 1
    RUNNING = 2
    STREAMING = 3
    DONE = 16
    SPILLED = 17  # done, and the outputs travel in a memory file of their own
    FAILED = 18  # code and text are in the slot
    CANCELLED = 19
    EXPIRED = 20
    WORKER_DIED = 21
    NOT_READY = 22
    DRAINING = 23


@dataclass(frozen=True, slots=True)
class Record:
    """`arena`, `spill`: ids given by the pool (`spill` 0: the input is in the slot). `seq`: of the slot's lease.
    Times are monotonic nanoseconds. `charges`: how many workers died running the task. `codec`: 0 for tensors,
    else the wire id of the codec of a raw body. `rows`: along the batch axis, 1 for a body, which nobody has looked
    into. `stream`: 1 for a task that is answered by pieces."""

    arena: int
    seq: int
    deadline_ns: int
    queued_ns: int
    spill: int
    slot: int
    charges: int
    codec: int
    rows: int
    stream: int = 0

    def pack(self) -> bytes:
        return RECORD.pack(
            self.arena,
            self.seq,
            self.deadline_ns,
            self.queued_ns,
            self.spill,
            self.slot,
            self.charges,
            self.codec,
            self.rows,
            self.stream,
        )

    @classmethod
    def unpack(cls, buffer: bytes | memoryview, offset: int = 0) -> Record:
        return cls(*RECORD.unpack_from(buffer, offset))


_FINAL = Struct("<QI4x0s")


class FrameReader:
    """Cuts a byte stream into frames, however it is cut up itself."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The word, slot and payload of every frame completed by `data`."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if not data[::FRAME_SIZE].isascii():
            # The first piece, if there is one, comes after final frames only, so that its low byte was looked at.
            return self._feed_pieces(data)
        cut = len(data) % FRAME_SIZE
        if cut:
            self._rest = data[-cut:]
            data = data[:-cut]
        return list(_FINAL.iter_unpack(data))

    def _feed_pieces(self, data: bytes) -> list[tuple[int, int, bytes]]:
        frames: list[tuple[int, int, bytes]] = []
        add = frames.append
        unpack = PIECE_HEAD.unpack_from
        at = 0
        last = len(data) - FRAME_SIZE
        while at <= last:
            word, slot, size = unpack(data, at)
            start = at + FRAME_SIZE
            at = start + size
            if at > len(data):
                at = start - FRAME_SIZE
                break
            add((word, slot, data[start:at]))
        self._rest = data[at:]
        return frames

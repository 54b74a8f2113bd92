"""Frames of streams on their way to one client, in few writes, in order. Pure but for the `write` it is given.

Nobody blocks on a client: what its pipe has no room for waits here, and each stream's credit bounds how much that
can be. Unlike the final frames of other tasks, which a client that finds its pipe was full can do without, pieces
are said once, so nothing here is ever left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from workers.records import FRAME, FRAME_SIZE, PIECE, PIECE_HEAD, PIECE_PART, PIECE_ROOM, WRITE_SIZE

T = TypeVar("T")


class Outgoing(Generic[T]):
    """`write` takes up to `WRITE_SIZE` bytes of whole frames, all or nothing; false: there is no room now. `T`: what
    stands for a stream whose final frame goes out."""

    __slots__ = ("_finals", "_parts", "_sealed", "_size", "_write")

    def __init__(self, write: Callable[[bytes], bool]) -> None:
        self._write = write
        self._sealed: deque[tuple[bytes, list[T]]] = deque()
        self._parts: list[bytes] = []
        self._size = 0
        self._finals: list[T] = []

    def add_piece(self, seq: int, slot: int, piece: bytes) -> None:
        size = len(piece)
        if size > PIECE_ROOM:
            piece = self._add_parts(seq, slot, piece)
            size = len(piece)
        total = self._size + size + FRAME_SIZE
        if total > WRITE_SIZE:
            self._seal()
            total = size + FRAME_SIZE
        self._size = total
        self._parts += (PIECE_HEAD.pack(seq << 8 | PIECE, slot, size), piece)

    def _add_parts(self, seq: int, slot: int, piece: bytes) -> bytes:
        """All of a long piece but its last part."""
        head = PIECE_HEAD.pack(seq << 8 | PIECE_PART, slot, PIECE_ROOM)
        start = 0
        while len(piece) - start > PIECE_ROOM:
            self._seal()
            self._parts = [head, piece[start : start + PIECE_ROOM]]
            self._size = WRITE_SIZE
            start += PIECE_ROOM
        return piece[start:]

    def add_final(self, word: int, slot: int, stream: T) -> None:
        if self._size + FRAME_SIZE > WRITE_SIZE:
            self._seal()
        self._size += FRAME_SIZE
        self._parts.append(FRAME.pack(word, slot))
        self._finals.append(stream)

    def flush(self) -> list[T]:
        """Write what there is room for; the streams whose final frame has gone out."""
        over: list[T] = []
        sealed = self._sealed
        while sealed or self._parts:
            if not sealed:
                self._seal()
            data, finals = sealed[0]
            if not self._write(data):
                break
            sealed.popleft()
            over += finals
        return over

    @property
    def waiting(self) -> bool:
        return bool(self._sealed or self._parts)

    def _seal(self) -> None:
        if self._parts:
            self._sealed.append((b"".join(self._parts), self._finals))
            self._parts, self._size, self._finals = [], 0, []

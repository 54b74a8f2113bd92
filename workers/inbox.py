"""What one worker holds, in memory that the pool sees too.

The worker reads records from the queue with `readv` straight into its inbox, so at whatever instant it dies the
pool finds them: an entry is there from the moment it left the queue until its task has been answered and the
entry is cleared. Records are read into its front; that of a stream is moved on to a place of its own, and stays
there until the stream has ended. The board is the replicas' common page: until when each of them goes before the
others.
"""

from __future__ import annotations

import mmap
import os

from workers.arena import reserve
from workers.records import QUEUED_WORD, RECORD_SIZE, RECORD_WORDS, ROWS_WORD, Record

# Words of the inbox header, written by the worker, read by the pool: since when it runs one batch (0 when it does
# not), tasks finished, how often it has taken records or looked after its streams, and how many of those it has.
BUSY_SINCE, FINISHED, TURNS, LIVE = 0, 1, 2, 3
_FRONT = 4  # how many entries are read into; the pool's
ENTRIES = 64


class Inbox:
    """`capacity` entries of one record each; an entry is empty when its first word, the arena, is 0. The first `front`
    are read into, the others are the places of streams."""

    __slots__ = ("capacity", "entries", "fd", "front", "map", "view", "words")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        size = os.fstat(fd).st_size
        self.capacity = (size - ENTRIES) // RECORD_SIZE
        self.map = mmap.mmap(fd, size)
        self.view = memoryview(self.map)
        self.words = self.view.cast("Q")
        self.front = self.words[_FRONT]
        self.entries = self.view[ENTRIES:]

    @classmethod
    def create(cls, front: int, places: int = 0) -> Inbox:
        inbox = cls(reserve("headrace-inbox", ENTRIES + (front + places) * RECORD_SIZE))
        inbox.front = inbox.words[_FRONT] = front
        return inbox

    def move(self, entry: int, place: int) -> None:
        """Put a record where it can stay. For a moment it is in both, but in none at no moment."""
        source, target = entry * RECORD_SIZE, place * RECORD_SIZE
        self.entries[target + 8 : target + RECORD_SIZE] = self.entries[source + 8 : source + RECORD_SIZE]
        # The word that makes it an entry comes last.
        first = ENTRIES // 8
        self.words[first + place * RECORD_WORDS] = self.words[first + entry * RECORD_WORDS]
        self.clear(entry)

    def clear(self, entry: int) -> None:
        self.words[ENTRIES // 8 + entry * RECORD_WORDS] = 0

    @property
    def occupied(self) -> bool:
        first = ENTRIES // 8
        return self.words[LIVE] > 0 or any(self.words[first : first + self.front * RECORD_WORDS : RECORD_WORDS])

    def queued_ns(self, entry: int) -> int:
        return self.words[ENTRIES // 8 + entry * RECORD_WORDS + QUEUED_WORD]

    def rows(self, first: int, count: int) -> int:
        """How many rows the tasks of `count` entries have together."""
        at = ENTRIES // 8 + first * RECORD_WORDS + ROWS_WORD
        return sum([word & 0xFFFFFFFF for word in self.words[at : at + count * RECORD_WORDS : RECORD_WORDS]])

    def has_stream(self, count: int) -> bool:
        """Whether one of the first `count` entries is a stream."""
        at = ENTRIES // 8 + ROWS_WORD
        return any([word >> 32 for word in self.words[at : at + count * RECORD_WORDS : RECORD_WORDS]])

    def held(self) -> list[Record]:
        """Every record in it, once, in the order of taking but for those of streams, which come last."""
        first = ENTRIES // 8
        found = [i for i, arena in enumerate(self.words[first::RECORD_WORDS]) if arena]
        records = [Record.unpack(self.entries, i * RECORD_SIZE) for i in found]
        return list({(record.arena, record.seq): record for record in records}.values())

    def close(self) -> None:
        os.close(self.fd)
        self.entries.release()
        self.words.release()
        self.view.release()
        self.map.close()


class Board:
    """One word for each replica of a model: the monotonic nanosecond until which it goes before the others, because it
    gathers a batch or has just run one; 0, or past, when it does not."""

    __slots__ = ("fd", "map", "words")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.words = memoryview(self.map).cast("Q")

    @classmethod
    def create(cls, replicas: int) -> Board:
        return cls(reserve("headrace-board", 8 * replicas))

    def busy_until(self, but: int, now_ns: int) -> int:
        """Until when another replica than `but` goes first; 0 if none does. A dead one's word simply expires."""
        other = self.first_busy(but, now_ns)
        return self.words[other] if other >= 0 else 0

    def first_busy(self, but: int, now_ns: int) -> int:
        """The index of a replica other than `but` that gathers, -1 if none does."""
        for i, word in enumerate(self.words):
            if i != but and word > now_ns:
                return i
        return -1

    def close(self) -> None:
        os.close(self.fd)
        self.words.release()
        self.map.close()

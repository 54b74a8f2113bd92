"""Records, frames, batches, the inbox and the board: what needs no process."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batching import gather_until, plan
from workers.errors import InvalidInput, ModelFailed, PoolError, Refused, code_of, from_code
from workers.inbox import BUSY_SINCE, FINISHED, LIVE, TURNS, Board, Inbox
from workers.outgoing import Outgoing
from workers.records import PIECE, PIECE_HEAD, PIECE_PART, RECORD_SIZE, WRITE_SIZE, FrameReader, Record
from workers.served import LONGEST_BACKOFF_S, backoff_s

U64, U32, U16 = (st.integers(0, (1 << bits) - 1) for bits in (64, 32, 16))


@given(st.builds(Record, U64, U64, U64, U64, U64, U32, U16, U16, U32, U32), st.integers(0, 3))
def test_a_record_is_64_bytes_and_comes_back_equal(record: Record, place: int) -> None:
    packed = record.pack()
    assert len(packed) == RECORD_SIZE == 64
    assert Record.unpack(bytes(place * RECORD_SIZE) + packed, place * RECORD_SIZE) == record


def frame(word: int, slot: int, payload: bytes) -> bytes:
    return PIECE_HEAD.pack(word, slot, len(payload)) + payload


FINALS = [(7 << 8 | 16, 3, b""), (1 << 63 | 16, 0, b""), (0, 4_000_000_000, b"")]
PIECES = [(9 << 8 | PIECE, 3, b"\0"), (9 << 8 | PIECE_PART, 3, b"\x80" * 40), (9 << 8 | PIECE, 3, b"")]


@pytest.mark.parametrize(
    "frames", [FINALS, PIECES, FINALS + PIECES, PIECES + FINALS], ids=["finals", "pieces", "finals first", "last"]
)
def test_frames_come_out_whole_wherever_the_stream_is_cut(frames: list[tuple[int, int, bytes]]) -> None:
    stream = b"".join(frame(*each) for each in frames)
    ends = [sum(16 + len(payload) for _, _, payload in frames[: i + 1]) for i in range(len(frames))]
    for cut in range(len(stream) + 1):
        reader = FrameReader()
        first = reader.feed(stream[:cut])
        assert first == frames[: sum(end <= cut for end in ends)]
        assert first + reader.feed(stream[cut:]) == frames


ANY_FRAME = st.one_of(
    st.tuples(U64.map(lambda word: word & ~0x80), U32, st.just(b"")),
    st.tuples(U64.map(lambda word: word & ~0x7F | PIECE), U32, st.binary(max_size=300)),
)


@given(st.lists(ANY_FRAME, max_size=20), st.lists(st.integers(0, 2000)))
def test_frames_come_out_whole_in_any_pieces(frames: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(frame(*each) for each in frames)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = FrameReader()
    found = [each for a, b in pairwise(bounds) for each in reader.feed(stream[a:b])]
    assert found == frames


@given(
    st.lists(st.tuples(st.integers(1, 5), st.one_of(st.just(b""), st.binary(max_size=20_000))), max_size=30),
    st.lists(st.booleans(), max_size=60),
)
def test_what_goes_out_comes_in_whole_however_often_the_pipe_is_full(
    pieces: list[tuple[int, bytes]], room: list[bool]
) -> None:
    written: list[bytes] = []

    def write(data: bytes) -> bool:
        assert 0 < len(data) <= WRITE_SIZE
        if room and not room.pop():
            return False
        written.append(data)
        return True

    outgoing: Outgoing[int] = Outgoing(write)
    over: list[int] = []
    for i, (slot, piece) in enumerate(pieces):
        outgoing.add_piece(slot, slot, piece)
        if i % 3 == 0:
            over += outgoing.flush()
    for slot in range(1, 6):
        outgoing.add_final(slot << 8 | 16, slot, slot)
    while outgoing.waiting:
        over += outgoing.flush()
    assert over == [1, 2, 3, 4, 5]
    reader = FrameReader()
    came: dict[int, list[bytes]] = defaultdict(list)
    parts: dict[int, bytes] = defaultdict(bytes)
    ended = []
    for word, slot, payload in (each for data in written for each in reader.feed(data)):
        assert word >> 8 == slot and slot not in ended
        if word & 0xFF == PIECE_PART:
            parts[slot] += payload
        elif word & 0xFF == PIECE:
            came[slot].append(parts.pop(slot, b"") + payload)
        else:
            ended.append(slot)
    assert ended == over and not parts
    assert all(came[slot] == [piece for s, piece in pieces if s == slot] for slot in range(1, 6))


def test_small_pieces_of_many_streams_share_writes() -> None:
    written: list[bytes] = []
    outgoing: Outgoing[int] = Outgoing(lambda data: written.append(data) is None)
    for slot in range(2000):
        outgoing.add_piece(slot, slot, b"piece")
    assert outgoing.flush() == [] and not outgoing.waiting
    assert len(written) == -(-2000 // (WRITE_SIZE // 21))


# Batches.


@dataclass(frozen=True)
class Wish:
    number: int
    group: str
    rows: int
    charges: int


WISHES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.sampled_from([0, 0, 0, 1, 2])), max_size=60)


@given(WISHES, st.integers(1, 12))
def test_every_task_runs_once_within_the_limits(wishes: list[tuple[str, int, int]], max_rows: int) -> None:
    tasks = [Wish(i, *wish) for i, wish in enumerate(wishes)]
    batches = plan(tasks, max_rows)
    assert sorted(task.number for batch in batches for task in batch) == list(range(len(tasks)))
    charged = [any(task.charges for task in batch) for batch in batches]
    assert charged == sorted(charged), "what has killed before comes last"
    by_group = defaultdict(list)
    for batch, alone in zip(batches, charged, strict=True):
        assert batch and len({task.group for task in batch}) == 1
        assert len(batch) == 1 or sum(task.rows for task in batch) <= max_rows
        assert len(batch) == 1 or not alone
        by_group[batch[0].group, alone] += [task.number for task in batch]
    assert all(numbers == sorted(numbers) for numbers in by_group.values()), "in the order of taking"


def test_a_batch_is_filled_before_the_next_is_begun() -> None:
    tasks = [Wish(i, "ab"[i % 2], 1, 0) for i in range(16)]
    assert [len(batch) for batch in plan(tasks, 4)] == [4] * 4
    assert [len(batch) for batch in plan(tasks, 1)] == [1] * 16


def test_gathering_ends_when_the_batch_is_full_or_the_oldest_has_waited_long_enough() -> None:
    assert gather_until(1_000, 1, 8, 500) == 1_500
    assert gather_until(1_000, 7, 8, 500) == 1_500
    assert gather_until(1_000, 8, 8, 500) == 0


def test_the_first_restart_is_at_once_and_the_wait_doubles_up_to_a_minute() -> None:
    assert [backoff_s(n) for n in range(10)] == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_s(5000) == LONGEST_BACKOFF_S == 60


# The inbox and the board.


def test_the_pool_sees_what_a_worker_has_read_and_not_cleared() -> None:
    ours = Inbox.create(4)
    theirs = Inbox(os.dup(ours.fd))
    read, write = os.pipe()
    records = [Record(9, seq, 1 << 62, 5, 0, 100 + seq, 0, 0, 10 * seq) for seq in range(1, 4)]
    os.write(write, b"".join(record.pack() for record in records))
    assert (ours.capacity, ours.held(), ours.occupied) == (4, [], False)
    assert os.readv(read, [theirs.entries]) == 3 * RECORD_SIZE
    assert ours.held() == records and ours.occupied
    assert (theirs.queued_ns(1), theirs.rows(0, 3), theirs.rows(1, 1)) == (5, 60, 20)
    theirs.clear(1)
    assert ours.held() == [records[0], records[2]]
    theirs.clear(0)
    assert ours.occupied
    theirs.clear(2)
    assert not ours.held() and not ours.occupied
    for word in (BUSY_SINCE, FINISHED, TURNS):
        theirs.words[word] = (1 << 64) - 1
        assert ours.words[word] == (1 << 64) - 1
    assert not ours.held(), "the header is no entry"
    for end in (read, write):
        os.close(end)
    theirs.close()
    ours.close()


def test_a_record_that_is_moved_is_held_once_at_every_moment() -> None:
    records = [Record(9, seq, 1 << 62, 5, 0, 100 + seq, 0, 0, 1, 1) for seq in (1, 2)]

    class Watched(Inbox):
        def clear(self, entry: int) -> None:
            found = sorted(self.held(), key=lambda record: record.seq)
            assert found == records, "a death now finds both, once each"
            super().clear(entry)

    inbox = Watched.create(2, 3)
    inbox.entries[: 2 * RECORD_SIZE] = b"".join(record.pack() for record in records)
    theirs = Inbox(os.dup(inbox.fd))
    assert (theirs.front, inbox.front, inbox.capacity) == (2, 2, 5)
    theirs.close()
    inbox.move(1, 4)
    inbox.move(0, 2)
    assert inbox.held() == records and not any(inbox.entries[: 2 * RECORD_SIZE : RECORD_SIZE])
    inbox.words[LIVE] = 1
    assert inbox.occupied
    inbox.words[LIVE] = 0
    assert not inbox.occupied, "the worker says how many places are taken"
    inbox.close()


def test_the_board_tells_of_others_that_gather_until_their_word_expires() -> None:
    board = Board.create(3)
    assert board.busy_until(0, 10) == 0
    board.words[0] = 100
    assert board.busy_until(0, 10) == 0, "oneself does not count"
    assert (board.busy_until(1, 10), board.busy_until(1, 99), board.busy_until(1, 100)) == (100, 100, 0)
    assert (board.first_busy(2, 10), board.first_busy(0, 10)) == (0, -1)
    board.close()


# Errors.


def every_error(cls: type[PoolError] = PoolError) -> list[type[PoolError]]:
    return [found for sub in cls.__subclasses__() for found in (sub, *every_error(sub))]


def test_an_error_is_the_same_after_code_and_text_have_crossed() -> None:
    own = [cls for cls in every_error() if cls.__module__ == "workers.errors" and cls is not Refused]
    assert len(own) == 12
    for cls in own:
        there = from_code(code_of(cls("some text")), "some text")
        assert type(there) is cls and str(there) == "some text"
    refused = from_code("LICENSE_FAILED", "pay")
    assert type(refused) is Refused and (refused.code, str(refused)) == ("LICENSE_FAILED", "pay")


@pytest.mark.parametrize("code", ["", "A\nB", "A" * 65, "Ä", "\ud800", 5, None, "a b"])
def test_a_code_that_a_slot_could_not_take_is_the_models_failure(code: object) -> None:
    assert code_of(Refused("no", code)) == ModelFailed.code  # type: ignore[arg-type]
    assert code_of(Refused("no", "A" * 64)) == "A" * 64
    assert code_of(InvalidInput("no")) == "INVALID_INPUT"

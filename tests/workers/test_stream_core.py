"""Both ends of a stream without processes: the client's core, and a worker's streams over the same memory and a pipe
that has as much room as the test says."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.arena import CHANGED, OVERFLOW, Arena
from workers.core import ClientCore, Task
from workers.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    ModelFailed,
    PoolError,
    PoolLost,
    WorkerDied,
)
from workers.inbox import FINISHED, LIVE, Inbox
from workers.model import Last, TensorSpec
from workers.outcomes import Outcomes
from workers.pieces import Pieces
from workers.records import (
    CONTROL,
    CREDIT,
    FRAME,
    PIECE,
    PIECE_COST,
    PIECE_HEAD,
    PIECE_PART,
    RECORD_SIZE,
    STATE,
    WINDOW,
    FrameReader,
    Record,
    SlotState,
)
from workers.startup import warm_up
from workers.status import ModelStatus, State
from workers.streams import LOOK_NS, PARKED_MS, Line, Streams
from workers.tasks import ClientView, HeldTask
from workers.tensors import Layouts

FAR = 1 << 62
STATUS = ModelStatus(
    "m", State.READY, "", "", 1, 1, 0, 5.0, 8, 64, (TensorSpec("x", "float32"),), (), predicts=False, streams=True
)


class Client:
    """A core whose worker is played by hand."""

    def __init__(self, slots: int = 8) -> None:
        self.core = ClientCore(Arena.create([(4096, slots)]), 7, [STATUS], 1 << 20)

    def submit(self, value: float = 1.0, deadline_ns: int = FAR) -> tuple[Task, Record]:
        inputs = {"x": np.array([value], np.float32)}
        task, record = self.core.submit_stream(self.core.model("m"), inputs, deadline_ns, 1)
        return task, Record.unpack(record)

    def word(self, record: Record, which: int) -> int:
        return self.core.arena.words[(self.core.arena.bases[record.slot] >> 3) + which]

    def pieces(self, task: Task) -> Pieces:
        return Pieces(self.core, task, lambda *_: pytest.fail("nothing to wait for"), lambda tasks: None, {})


def frame(record: Record, data: bytes, kind: int = PIECE) -> bytes:
    return PIECE_HEAD.pack(record.seq << 8 | kind, record.slot, len(data)) + data


def final(record: Record, outcome: int = SlotState.DONE) -> bytes:
    return FRAME.pack(record.seq << 8 | outcome, record.slot)


@pytest.fixture
def client() -> Iterator[Client]:
    it = Client()
    yield it
    it.core.close()


# The client's core.


def test_a_stream_is_told_apart_in_its_record_and_starts_with_a_window(client: Client) -> None:
    _, record = client.submit(deadline_ns=99)
    assert (record.stream, record.rows, record.deadline_ns) == (1, 1, 99)
    assert client.word(record, STATE) == record.seq << 8 | SlotState.QUEUED
    assert client.word(record, CREDIT) == WINDOW


def test_pieces_come_in_order_each_stream_is_woken_once_and_the_end_is_last(client: Client) -> None:
    (one, first), (two, second) = client.submit(), client.submit()
    heard = client.core.receive(frame(first, b"a") + frame(second, b"b") + frame(first, b"") + frame(first, b"c"))
    assert heard == [one, two]
    assert client.core.take(one) == [b"a", b"", b"c"] and client.core.take(one) == []
    stream = client.pieces(one)
    assert not stream.ended
    assert client.core.receive(frame(first, b"d") + final(first)) == [one]
    assert not stream.ended and stream.take() == [b"d"] and stream.ended and stream.failure() is None
    assert client.core.receive(final(first) + frame(first, b"late")) == []
    assert (client.core.leased, client.core.under_way) == (1, 1)
    stream = client.pieces(two)
    client.core.receive(final(second, SlotState.WORKER_DIED))
    assert stream.take() == [b"b"] and isinstance(stream.failure() or (stream.ended and stream.failure()), WorkerDied)
    assert client.core.leased == 0


def test_a_piece_in_parts_comes_as_one_and_those_of_others_come_between(client: Client) -> None:
    (one, first), (two, second) = client.submit(), client.submit()
    heard = client.core.receive(frame(first, b"a" * 9, PIECE_PART) + frame(second, b"x"))
    assert heard == [two], "no whole piece, nothing to hear of"
    assert client.core.receive(frame(first, b"b", PIECE_PART) + frame(first, b"c")) == [one]
    assert client.core.take(one) == [b"a" * 9 + b"bc"]
    assert one.consumed == 11 + PIECE_COST
    client.core.receive(frame(first, b"lost", PIECE_PART) + final(first, SlotState.WORKER_DIED) + final(second))
    assert client.core.take(one) == [], "half a piece is none"


def test_to_take_grants_nothing_and_to_grant_grants_what_was_taken(client: Client) -> None:
    task, record = client.submit()
    client.core.receive(frame(record, b"abc") + frame(record, b"de"))
    client.core.take(task)
    assert client.word(record, CREDIT) == WINDOW
    before = client.core.arena.words[CHANGED]
    client.core.grant(task)
    assert client.word(record, CREDIT) == WINDOW + 5 + 2 * PIECE_COST
    assert client.core.arena.words[CHANGED] != before
    client.core.receive(final(record))
    client.core.release(task)
    client.core.grant(task)
    assert client.word(record, CREDIT) == WINDOW + 5 + 2 * PIECE_COST, "the slot is another's now"


def test_an_abandoned_stream_keeps_its_slot_up_to_the_final_frame_and_hears_nothing(client: Client) -> None:
    task, record = client.submit()
    client.core.receive(frame(record, b"a"))
    stream = client.pieces(task)
    before = client.core.arena.words[CHANGED]
    stream.close()
    assert client.word(record, CONTROL) & 0xFF == 1 and client.core.arena.words[CHANGED] != before
    assert stream.ended and isinstance(stream.failure(), Cancelled) and stream.take() == []
    assert client.core.receive(frame(record, b"b")) == [] and stream.take() == []
    assert client.core.leased == 1
    assert client.core.receive(final(record, SlotState.CANCELLED)) == []
    assert client.core.leased == 0


def test_what_came_before_a_deadline_may_still_be_taken(client: Client) -> None:
    task, record = client.submit(deadline_ns=50)
    client.core.receive(frame(record, b"a"))
    assert client.core.expire(50) == [task]
    stream = client.pieces(task)
    assert next(stream) == b"a"
    with pytest.raises(DeadlineExceeded):
        next(stream)
    with pytest.raises(DeadlineExceeded):
        next(stream)
    client.core.receive(final(record, SlotState.EXPIRED))


def test_a_loss_of_the_pool_does_not_undo_what_had_ended(client: Client) -> None:
    (one, first), (two, _), (three, third) = client.submit(), client.submit(), client.submit()
    client.core.receive(frame(first, b"a") + final(first) + final(third, SlotState.DRAINING))
    assert client.core.lose() == [two]
    streams = [client.pieces(task) for task in (one, two, three)]
    client.core.close()
    assert list(streams[0]) == [b"a"]
    assert streams[1].ended and isinstance(streams[1].failure(), PoolLost)
    assert streams[2].ended and "draining" in str(streams[2].failure())


def test_to_give_up_a_task_of_before_gives_up_no_other_of_that_number(client: Client) -> None:
    before = Client()
    (old, _), (new, record) = before.submit(), client.submit()
    assert old.seq == new.seq
    before.core.lose()
    before.core.close()
    assert not client.core.abandon(old, Cancelled("the client has gone"))
    assert new.error is None and client.word(record, CONTROL) & 0xFF == 0
    assert client.core.receive(final(record)) == [new]


def test_a_stream_given_up_counts_as_waiting_while_it_is_queued_only(client: Client) -> None:
    (waits, first), (silent, second) = client.submit(), client.submit()
    client.core.arena.words[client.core.arena.bases[second.slot] >> 3] = second.seq << 8 | SlotState.RUNNING
    for task in (waits, silent):
        assert client.core.abandon(task, Cancelled("enough"))
    assert client.core.model("m").abandoned == {first.seq}
    client.core.receive(final(first, SlotState.CANCELLED) + final(second, SlotState.CANCELLED))


def test_two_threads_that_see_the_end_at_once_both_see_how_it_was(client: Client) -> None:
    task, record = client.submit()
    client.core.receive(final(record, SlotState.FAILED))
    stream = client.pieces(task)
    failure = ClientCore.failure

    def meanwhile(core: ClientCore, task: Task) -> PoolError | None:
        """Just when one of them looks, the other is through."""
        core.failure = partial(failure, core)  # type: ignore[method-assign]
        assert stream.ended
        return core.failure(task)

    client.core.failure = partial(meanwhile, client.core)  # type: ignore[method-assign]
    stream.close()
    assert isinstance(stream.failure(), PoolError) and client.core.leased == 0


def test_what_a_worker_that_died_was_at_is_said(client: Client) -> None:
    tasks = [client.submit() for _ in range(4)]
    (silent, _), (begun, second), (parts, third), (unheard, fourth) = tasks
    client.core.arena.words[client.core.arena.bases[fourth.slot] >> 3] = fourth.seq << 8 | SlotState.STREAMING
    client.core.receive(frame(second, b"a") + frame(third, b"b", PIECE_PART))
    client.core.receive(b"".join(final(record, SlotState.WORKER_DIED) for _, record in tasks))
    assert "and so did the next" in str(client.core.failure(silent))
    for task in (begun, parts, unheard):
        assert str(client.core.failure(task)) == "the worker died while the stream was under way"
    for task, _ in tasks:
        client.core.release(task)


def test_a_full_pipe_ends_no_stream_that_has_begun(client: Client) -> None:
    (begun, first), (queued, second) = client.submit(), client.submit()
    words, bases = client.core.arena.words, client.core.arena.bases
    words[bases[first.slot] >> 3] = first.seq << 8 | SlotState.STREAMING
    words[bases[second.slot] >> 3] = second.seq << 8 | SlotState.EXPIRED
    words[OVERFLOW] = 1
    assert client.core.receive(b"") == [queued]
    assert not begun.outcome


# A worker's streams.


class Script:
    """A stepwise model: each state is an iterator over what its stream answers."""

    inputs = STATUS.inputs
    outputs = ()

    def __init__(self) -> None:
        self.scripts: list[Iterator[Any]] = []
        self.stopped: list[Any] = []
        self.steps: list[int] = []

    def start(self, request: Any) -> Any:
        script = self.scripts.pop(0)
        if script is None:
            raise ValueError("no start")
        return script

    def step(self, states: Sequence[Any]) -> list[Any]:
        self.steps.append(len(states))
        return [next(state) for state in states]

    def stop(self, state: Any) -> None:
        self.stopped.append(state)


class Both(Client):
    """A core, and a worker's streams behind a pipe with `room` for so many writes; None: as many as there are."""

    def __init__(self) -> None:
        super().__init__(64)
        self.read, self.write = os.pipe2(os.O_NONBLOCK)
        self.inbox = Inbox.create(4, 60)
        self.model = Script()
        outcomes = Outcomes(self.model, self.inbox, None, Layouts(), 1 << 20)  # type: ignore[arg-type]
        self.streams = Streams(self.model, self.inbox, outcomes, explain)
        self.view = ClientView(Arena(os.dup(self.core.arena.fd)), self.write)
        self.layouts = Layouts()
        self.now = LOOK_NS
        self.room: int | None = None
        self.finals: set[int] = set()
        """Whose final frame has been written."""

    def begin(self, *script: Any, deadline_ns: int = FAR, charges: int = 0) -> tuple[Task, Record]:
        """A stream that the worker has taken, with what its model will answer."""
        self.model.scripts.append(iter(script))
        task, record = self.submit(deadline_ns=deadline_ns)
        self.inbox.entries[:RECORD_SIZE] = record.pack()
        held = HeldTask(0, self.view, record.slot, record.seq, record.deadline_ns, charges, 0)
        held.layout = self.layouts.parse(self.view.arena.map[held.base + 64 : held.base + 64 + self.word(record, 2)])
        self.streams.admit(held)
        for line in self.streams._lines.values():
            line.outgoing._write = partial(self.put, line)
        return task, record

    def put(self, line: Line, data: bytes) -> bool:
        if self.room is not None and not line.gone:
            if not self.room:
                return False
            self.room -= 1
        frames = FrameReader().feed(data)
        self.finals |= {word >> 8 for word, _, _ in frames if word & 0xFF < PIECE}
        return line._write(data)

    def turn(self, ns: int = 1_000_000) -> None:
        self.now += ns
        self.streams.turn(self.now)

    def hear(self) -> list[Task]:
        try:
            return self.core.receive(os.read(self.read, 1 << 20))
        except BlockingIOError:
            return self.core.receive(b"")

    def held(self) -> list[int]:
        return [record.seq for record in self.inbox.held()]

    def close(self) -> None:
        self.streams.drop(self.view)
        os.close(self.read)
        self.view.close()
        self.inbox.close()
        self.core.close()


def explain(error: BaseException) -> PoolError:
    return error if isinstance(error, PoolError) else ModelFailed(str(error))


@pytest.fixture
def both() -> Iterator[Both]:
    it = Both()
    yield it
    it.close()


def test_a_record_stays_in_its_place_until_the_final_frame_is_in_the_pipe(both: Both) -> None:
    task, record = both.begin("a", Last("b"))
    assert (both.held(), both.inbox.words[LIVE], both.streams.none) == ([record.seq], 1, False)
    assert both.word(record, STATE) & 0xFF == SlotState.RUNNING
    both.turn()
    assert both.word(record, STATE) & 0xFF == SlotState.STREAMING
    both.room = 0
    both.turn()
    assert both.model.stopped, "the model is done with it"
    assert both.held() == [record.seq] and both.streams.wait_ms() == PARKED_MS
    assert both.word(record, STATE) & 0xFF == SlotState.STREAMING
    both.core.arena.words[OVERFLOW] = 1
    assert both.hear() == [task] and not task.outcome, "a look at the slots ends nothing"
    both.room = None
    both.turn()
    assert (both.held(), both.inbox.words[LIVE], both.streams.none) == ([], 0, True)
    assert both.streams.wait_ms() is None
    assert both.hear() == [task] and task.outcome == SlotState.DONE
    assert both.core.take(task) == [b"a", b"b"]
    assert both.inbox.words[FINISHED] == 1


def test_one_that_ends_without_a_piece_ends_like_any_task(both: Both) -> None:
    ends = {SlotState.DONE: None, SlotState.FAILED: ValueError("no")}
    for outcome, answer in ends.items():
        task, record = both.begin("", answer)
        both.turn()
        both.turn()
        assert both.word(record, STATE) == record.seq << 8 | outcome
        assert both.hear() == [task] and task.outcome == outcome
        both.core.release(task)
    both.model.scripts.append(None)  # type: ignore[arg-type]
    task, record = both.begin()
    assert both.word(record, STATE) & 0xFF == SlotState.FAILED and both.hear() == [task]
    assert str(both.core.failure(task)) == "no start"
    assert len(both.model.stopped) == 2 and both.streams.none


def test_who_has_spent_its_credit_sits_out_until_it_is_granted_more(both: Both) -> None:
    task, _ = both.begin(*[b"x" * (WINDOW // 2)] * 9)
    beside, _ = both.begin(*["y"] * 20)
    for _ in range(6):
        both.turn()
    assert both.model.steps == [2, 2, 1, 1, 1, 1]
    both.hear()
    assert len(both.core.take(task)) == 2
    both.turn()
    assert both.model.steps[-1] == 1, "to take is not to grant"
    both.core.grant(task)
    both.turn()
    assert both.model.steps[-1] == 2
    assert both.core.take(beside)


def test_a_cancel_is_seen_at_the_next_turn_a_deadline_at_the_next_look(both: Both) -> None:
    cancelled, _ = both.begin(*["x"] * 20)
    expiring, second = both.begin(*["x"] * 200, deadline_ns=2 * LOOK_NS)
    both.turn()
    both.core.abandon(cancelled, Cancelled("enough"))
    both.turn()
    assert both.model.steps == [2, 1] and both.held() == [second.seq]
    while both.now < 3 * LOOK_NS:
        both.turn()
    assert both.streams.none and len(both.model.stopped) == 2
    both.hear()
    assert expiring.outcome == SlotState.EXPIRED and both.core.leased == 1


def test_a_cancel_whose_word_was_not_seen_to_change_is_seen_at_the_next_look(both: Both) -> None:
    task, _ = both.begin(*["x"] * 200)
    both.turn()
    both.core.abandon(task, Cancelled("enough"))
    next(iter(both.streams._lines.values())).seen = both.core.arena.words[CHANGED]
    both.turn()
    assert not both.streams.none
    both.turn(LOOK_NS)
    assert both.streams.none


def test_streams_of_a_client_that_has_gone_leave_with_what_they_had_to_say(both: Both) -> None:
    both.begin(*["x"] * 9)
    both.begin("x", Last("y"))
    both.room = 0
    both.turn()
    both.turn()
    assert both.streams.drop(both.view)
    assert both.streams.none and both.held() == [] and len(both.model.stopped) == 2
    assert both.streams.drop(both.view), "there is none left"


def test_those_a_worker_died_of_are_begun_one_by_one(both: Both) -> None:
    _, other = both.begin("x", Last("y"))
    _, first = both.begin("", "a", Last("b"), charges=1)
    _, second = both.begin(None, charges=1)
    _, third = both.begin("", "c", Last("d"), charges=1)
    both.turn()

    def states() -> list[int]:
        return [both.word(record, STATE) & 0xFF for record in (first, second, third, other)]

    both.hear()
    running, queued, streaming = SlotState.RUNNING, SlotState.QUEUED, SlotState.STREAMING
    assert states() == [running, queued, queued, streaming], "it has said nothing yet"
    assert both.held() == [record.seq for record in (other, first, second, third)]
    both.turn()
    assert states()[:2] == [streaming, queued]
    both.turn()
    assert states()[1:3] == [SlotState.DONE, queued]
    both.turn()
    assert states()[2] == running
    for _ in range(3):
        both.turn()
    assert both.streams.none and both.held() == []
    for task in both.hear():
        both.core.release(task)


def test_one_that_waits_to_be_begun_again_can_be_cancelled_and_expires(both: Both) -> None:
    both.begin(*[""] * 9, charges=1)
    cancelled, record = both.begin(charges=1)
    both.begin(charges=1, deadline_ns=2)
    both.core.abandon(cancelled, Cancelled("enough"))
    both.turn(LOOK_NS)
    assert len(both.held()) == 1
    assert both.word(record, STATE) & 0xFF == SlotState.CANCELLED
    both.begin(charges=1)
    assert both.streams.drop(both.view) and both.streams.none and both.held() == []


def test_a_slot_and_its_record_are_never_lost_sight_of(both: Both) -> None:
    """The inputs are refused before a slot is taken."""
    with pytest.raises(InvalidInput, match="2 rows"):
        both.core.submit_stream(both.core.model("m"), {"x": np.zeros(2, np.float32)}, FAR, 1)
    assert both.core.leased == 0


# Warm-up.


def test_a_warm_up_does_not_wait_for_ever_for_a_model_that_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.startup.WITHOUT_PIECES_S", 0.05)

    class Silent:
        inputs = outputs = ()
        steps = stopped = 0

        def load(self) -> None: ...

        def start(self, request: object) -> None: ...

        def step(self, states: Sequence[None]) -> list[str]:
            self.steps += 1
            return [""] * len(states)

        def stop(self, state: None) -> None:
            self.stopped += 1

    model = Silent()
    warm_up(model)
    assert model.steps > 0 and model.stopped == 1


def test_a_warm_up_takes_a_stream_to_its_first_piece_and_stops_it() -> None:
    model = Script()
    model.scripts = [iter(["", b"", "a", ValueError("too far")]), iter([None]), iter([Last("a")])]
    for _ in range(3):
        warm_up(model)  # type: ignore[arg-type]
    assert len(model.steps) == 5 and len(model.stopped) == 3
    talk = Talk(["", "a", ValueError("too far")])
    warm_up(talk)
    assert (talk.said, talk.closed) == (2, True)
    warm_up(Talk([]))


@pytest.mark.parametrize(
    ("answer", "reason"), [(ValueError("cold"), "cold"), (5, "a piece is a int"), ("\ud800", "no text")]
)
def test_a_warm_up_that_fails_says_why(answer: Any, reason: str) -> None:
    model = Script()
    model.scripts = [iter([answer])]
    with pytest.raises(Exception, match=reason):
        warm_up(model)  # type: ignore[arg-type]
    assert len(model.stopped) == 1
    with pytest.raises(Exception, match=reason):
        warm_up(Talk([answer]))
    with pytest.raises(TypeError, match="neither `predict` nor `stream` nor `start` and `step`"):
        warm_up(Silent())


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned None; it must return"),
        ("abc", "returned a value of type str; it must return"),
        (5, "returned a value of type int; it must return"),
    ],
)
def test_a_model_that_returns_no_pieces_is_told_what_would_be_right(both: Both, returned: Any, reason: str) -> None:
    wrong = Wrong(returned)
    with pytest.raises(ModelFailed, match="`stream` " + reason + " an iterator of pieces"):
        warm_up(SimpleNamespace(inputs=STATUS.inputs, outputs=(), load=wrong.load, stream=wrong.give))
    steps = SimpleNamespace(inputs=STATUS.inputs, outputs=(), load=wrong.load, start=wrong.give, step=wrong.give)
    with pytest.raises(ModelFailed, match="`step` " + reason + " a sequence, one answer for each state"):
        warm_up(steps)
    task, _ = both.begin("a")
    both.model.step = wrong.give  # type: ignore[assignment]
    both.turn()
    both.hear()
    assert "`step` " + reason in str(both.core.failure(task))
    both.core.release(task)


class Wrong:
    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def load(self) -> None: ...

    def give(self, _: Any) -> Any:
        return self.returned


def test_a_model_that_predicts_and_streams_is_warmed_up_at_both() -> None:
    def predict(batch: Any) -> Any:
        return {}

    def start(request: Any) -> Any:
        raise ValueError("cold start")

    def step(states: Any) -> Any:
        return [None]

    both = {"inputs": STATUS.inputs, "outputs": (), "load": lambda: None, "predict": predict}
    with pytest.raises(ValueError, match="cold start"):
        warm_up(SimpleNamespace(**both, start=start, step=step))
    with pytest.raises(ValueError, match="cold start"):
        warm_up(SimpleNamespace(**both, stream=start))
    warm_up(SimpleNamespace(**both))


class Silent:
    inputs = STATUS.inputs
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None: ...


class Talk(Silent):
    """Says, or raises, what it is given."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.said = 0
        self.closed = False

    def stream(self, request: Any) -> Iterator[Any]:
        assert request["x"].shape == () and request["x"] == 0 and not request["x"].flags.writeable
        try:
            for answer in self.answers:
                self.said += 1
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            self.closed = True


MOVES = st.lists(st.tuples(st.sampled_from("bbbttttthcgxff"), st.integers(0, 9), st.integers(0, 12_000)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_whatever_happens_each_stream_is_held_or_its_client_knows_the_end(moves: list[tuple[str, int, int]]) -> None:
    gc.collect()
    both = Both()
    try:
        streams: dict[int, SimpleNamespace] = {}
        numbers = count()
        for move, which, size in moves:
            some = list(streams.values())[which % len(streams)] if streams else None
            if move == "b" and len(streams) < 60:
                said = [f"{next(numbers)}".encode().ljust(size * (i % 2), b".") for i in range(which % 5)]
                task, record = both.begin(*said, None)
                streams[record.seq] = SimpleNamespace(task=task, said=said, came=[], closed=False)
            elif move == "t":
                both.turn()
            elif move == "h":
                both.hear()
            elif move == "f":
                both.room = which // 3 if which < 7 else None
            elif some is not None and not some.closed and move == "c":
                some.came += both.core.take(some.task)
            elif some is not None and move == "g":
                both.core.grant(some.task)
            elif some is not None and move == "x" and which == 0:
                some.closed = both.core.abandon(some.task, Cancelled("enough"))
            # Were the worker to die now, the pool would find whoever's end is not in the pipe.
            held = set(both.held())
            for seq, task in both.core._tasks.items():
                state = both.core.arena.words[task.base >> 3] & 0xFF
                assert seq in held or seq in both.finals or state >= SlotState.DONE
        both.room = None
        for _ in range(400):
            both.turn()
            both.hear()
            for stream in streams.values():
                stream.came += both.core.take(stream.task)
                both.core.grant(stream.task)
        both.turn(LOOK_NS)
        both.hear()
        assert both.held() == [] and both.streams.none and both.core.under_way == 0
        assert len(both.model.stopped) == len(streams)
        for stream in streams.values():
            if stream.task.outcome:
                assert (stream.came, stream.task.outcome) == (stream.said, SlotState.DONE)
            else:
                assert stream.came == stream.said[: len(stream.came)]
            both.core.release(stream.task)
        assert both.core.leased == 0
    finally:
        both.close()

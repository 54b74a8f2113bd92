"""The client's core against a worker played by hand: its records are read, its frames written, in memory."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.workers.drivers import Call
from workers.arena import OVERFLOW, Arena, reserve
from workers.core import ClientCore, Task
from workers.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidInput,
    ModelFailed,
    ModelNotFound,
    NotReady,
    Overloaded,
    PoolError,
    PoolLost,
    Refused,
    TooLarge,
    WorkerDied,
)
from workers.model import Array, TensorSpec
from workers.records import CANCEL, CONTROL, FRAME, INPUT, OUTPUT, SLOT_HEADER, STATE, Record, SlotState
from workers.status import ModelStatus, State
from workers.tensors import Layouts, signature

ARENA = 7
SLOTS = [(4096, 16), (65536, 4)]
SPILL_LIMIT = 1 << 20
FAR = 1 << 62


def status(name: str, state: State = State.READY, reason: str = "", code: str = "") -> ModelStatus:
    specs = (TensorSpec("x", "float32", (-1,)),), (TensorSpec("y", "float32", (-1,)),)
    return ModelStatus(name, state, reason, code, 1, 1, 0, 5.0, 8, 3, *specs)


class Pair:
    """A core, and the worker's part of the protocol."""

    def __init__(self, *models: str) -> None:
        self.core = ClientCore(Arena.create(SLOTS), ARENA, [status(name) for name in models], SPILL_LIMIT)
        self.arena = Arena(os.dup(self.core.arena.fd))
        self.layouts = Layouts()

    def submit(self, model: str = "a", size: int = 1, deadline_ns: int = FAR) -> tuple[Task, Record]:
        inputs = {"x": np.arange(size, dtype=np.float32)[None]}
        task, record = self.core.submit(self.core.model(model), inputs, deadline_ns, 1)
        return task, Record.unpack(record)

    def word(self, record: Record, which: int) -> int:
        return self.arena.words[(self.arena.bases[record.slot] >> 3) + which]

    def inputs(self, record: Record) -> dict[str, Array]:
        at = self.arena.bases[record.slot] + SLOT_HEADER
        layout = self.layouts.parse(self.arena.map[at : at + self.word(record, INPUT)])
        return {name: array.copy() for name, array in layout.views(self.arena.map, at).items()}

    def outcome(self, record: Record, state: SlotState) -> bytes:
        """Into the slot; the frame for it."""
        word = record.seq << 8 | state
        self.arena.words[self.arena.bases[record.slot] >> 3] = word
        return FRAME.pack(word, record.slot)

    def answer(self, record: Record, values: list[float]) -> bytes:
        outputs = {"y": np.array([values], np.float32)}
        layout = self.layouts.of(signature(outputs))
        at = 2048
        start = self.arena.bases[record.slot] + at
        self.arena.view[start : start + len(layout.descriptor)] = layout.descriptor
        for name, view in layout.views(self.arena.map, start).items():
            view[...] = outputs[name]
        self.arena.words[(self.arena.bases[record.slot] >> 3) + OUTPUT] = at << 32 | len(layout.descriptor)
        return self.outcome(record, SlotState.DONE)

    def fail(self, record: Record, text: str) -> bytes:
        start = self.arena.bases[record.slot] + 2048
        block = text.encode()
        self.arena.view[start : start + len(block)] = block
        self.arena.words[(self.arena.bases[record.slot] >> 3) + OUTPUT] = 2048 << 32 | len(block)
        return self.outcome(record, SlotState.FAILED)

    def close(self) -> None:
        self.core.close()
        self.arena.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    it = Pair("a")
    yield it
    it.close()


def outputs(pair: Pair, task: Task) -> list[float]:
    values: list[float] = pair.core.arrays(task)["y"][0].tolist()
    pair.core.release(task)
    return values


def error_of(pair: Pair, task: Task) -> PoolError:
    with pytest.raises(PoolError) as raised:
        pair.core.arrays(task)
    pair.core.release(task)
    return raised.value


def test_a_task_goes_out_and_its_answer_comes_back(pair: Pair) -> None:
    task, record = pair.submit(size=3, deadline_ns=99)
    assert (record.arena, record.deadline_ns, record.queued_ns, record.charges, record.codec) == (ARENA, 99, 1, 0, 0)
    assert pair.word(record, STATE) == record.seq << 8 | SlotState.QUEUED
    assert pair.inputs(record)["x"].tolist() == [[0, 1, 2]]
    assert (pair.core.leased, pair.core.under_way) == (1, 1)
    assert pair.core.receive(pair.answer(record, [5, 6])) == [task]
    assert (pair.core.leased, pair.core.under_way) == (1, 0)
    assert outputs(pair, task) == [5, 6]
    assert pair.core.leased == 0


def test_frames_may_come_in_any_pieces_and_order(pair: Pair) -> None:
    sent = [pair.submit() for _ in range(5)]
    stream = b"".join(pair.answer(record, [i]) for i, (_, record) in reversed(list(enumerate(sent))))
    settled = [task for i in range(len(stream)) for task in pair.core.receive(stream[i : i + 1])]
    assert settled == [task for task, _ in reversed(sent)]
    assert [outputs(pair, task) for task, _ in sent] == [[i] for i in range(5)]


def test_final_frames_said_twice_or_out_of_date_change_nothing(pair: Pair) -> None:
    first, record = pair.submit()
    frame = pair.answer(record, [1])
    assert pair.core.receive(frame) == [first]
    assert pair.core.receive(frame) == [], "said twice before it is taken"
    outputs(pair, first)
    assert pair.core.receive(frame) == []
    second, again = pair.submit()
    assert again.slot == record.slot and again.seq != record.seq
    assert pair.core.receive(frame) == [], "of the slot's former task"
    assert pair.core.under_way == 1
    assert pair.core.receive(FRAME.pack(again.seq << 8 | SlotState.DONE, record.slot + 1)) == []
    assert pair.core.receive(FRAME.pack(0, 0) + FRAME.pack(5 << 8, 4_000_000)) == []
    assert pair.core.receive(pair.answer(again, [2])) == [second]
    assert outputs(pair, second) == [2]
    assert pair.core.leased == 0


def test_a_slot_is_given_back_once_however_often_it_is_released(pair: Pair) -> None:
    task, record = pair.submit()
    pair.core.release(task)
    assert pair.core.leased == 1, "it is not settled yet"
    pair.core.receive(pair.answer(record, [1]))
    for _ in range(3):
        pair.core.release(task)
    with pytest.raises(RuntimeError, match="taken already"):
        pair.core.arrays(task)
    with pytest.raises(RuntimeError, match="taken already"):
        pair.core.body(task)
    assert pair.core.leased == 0
    withdrawn, _ = pair.submit()
    for _ in range(3):
        pair.core.withdraw(withdrawn)
    assert pair.core.leased == 0
    assert len({pair.submit()[1].slot for _ in range(20)}) == 20, "no slot has two owners"


def test_a_frame_that_cannot_be_heeded_costs_only_itself(pair: Pair) -> None:
    spilled, record = pair.submit(size=10_000)
    task, other = pair.submit()
    pair.core.abandon(spilled, Cancelled())
    assert spilled.spill is not None
    os.close(spilled.spill.fd)
    assert pair.core.receive(pair.answer(record, [1]) + pair.answer(other, [2])) == [task]
    assert isinstance(pair.core.trouble, OSError)
    assert outputs(pair, task) == [2]


def test_threads_that_settle_abandon_and_release_at_once_give_back_each_slot_once(pair: Pair) -> None:
    """A reader, a keeper that lets deadlines pass, a waiter, and one who gives the tasks up."""
    rounds, switch = 300, sys.getswitchinterval()
    tasks: list[Task] = []
    frames = b""
    gate = threading.Barrier(5)

    def each_round(step: Callable[[], object]) -> None:
        for _ in range(rounds):
            gate.wait(20)
            step()
            gate.wait(20)

    def take() -> None:
        for task in tasks:
            while not (task.outcome or task.error):
                time.sleep(0)
            pair.core.release(task)

    def give_up() -> None:
        for task in reversed(tasks):
            if not pair.core.abandon(task, Cancelled()):
                pair.core.release(task)

    steps = (lambda: pair.core.receive(frames), lambda: pair.core.expire(FAR), take, give_up)
    sys.setswitchinterval(1e-6)
    calls = [Call(lambda step=step: each_round(step)) for step in steps]  # type: ignore[misc]
    try:
        for n in range(rounds):
            sent = [pair.submit() for _ in range(16)]
            tasks[:] = [task for task, _ in sent]
            frames = b"".join(pair.answer(record, [n]) for _, record in sent)
            gate.wait(20)
            gate.wait(20)
            assert (pair.core.leased, pair.core.under_way) == (0, 0)
            assert not pair.core.model("a").abandoned
    finally:
        sys.setswitchinterval(switch)
        gate.abort()
        for call in calls:
            call.join()


@pytest.mark.parametrize("how", ["expire", "cancel", "lose"])
def test_a_slot_is_free_only_after_its_final_frame(pair: Pair, how: str) -> None:
    task, record = pair.submit(deadline_ns=100)
    if how == "expire":
        assert pair.core.expire(99) == []
        assert pair.core.expire(100) == [task]
        assert pair.core.expire(101) == []
        kind: type[PoolError] = DeadlineExceeded
    elif how == "cancel":
        assert pair.core.abandon(task, Cancelled("x"))
        assert not pair.core.abandon(task, Cancelled("x"))
        kind = Cancelled
    else:
        assert pair.core.lose() == [task]
        kind = PoolLost
    assert pair.word(record, CONTROL) == record.seq << 8 | CANCEL
    assert type(error_of(pair, task)) is kind
    assert (pair.core.leased, pair.core.under_way) == (1, 1)
    assert pair.core.receive(pair.answer(record, [1])) == [], "nobody waits"
    assert (pair.core.leased, pair.core.under_way) == (0, 0)
    assert type(error_of(pair, task)) is kind
    assert pair.core.leased == 0, "given back once"


def test_a_cancel_of_the_slots_former_task_is_not_meant_for_the_next(pair: Pair) -> None:
    task, record = pair.submit()
    pair.core.abandon(task, Cancelled("x"))
    pair.core.receive(pair.outcome(record, SlotState.CANCELLED))
    _, again = pair.submit()
    assert again.slot == record.slot
    assert pair.word(again, CONTROL) != again.seq << 8 | CANCEL


def test_lost_frames_are_found_in_the_slots(pair: Pair) -> None:
    sent = [pair.submit() for _ in range(4)]
    frames = [pair.answer(record, [i]) for i, (_, record) in enumerate(sent[:3])]
    pair.arena.words[OVERFLOW] = 1
    settled = pair.core.receive(frames[1])
    assert sorted(settled, key=lambda task: task.seq) == [task for task, _ in sent[:3]]
    assert pair.arena.words[OVERFLOW] == 0
    assert pair.core.receive(frames[0]) == [], "a frame that comes after all"
    assert [outputs(pair, task) for task, _ in sent[:3]] == [[0], [1], [2]]
    assert pair.core.under_way == 1


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (SlotState.CANCELLED, Cancelled),
        (SlotState.EXPIRED, DeadlineExceeded),
        (SlotState.WORKER_DIED, WorkerDied),
        (SlotState.NOT_READY, NotReady),
        (SlotState.DRAINING, Draining),
    ],
)
def test_every_outcome_has_its_error(pair: Pair, state: SlotState, kind: type[PoolError]) -> None:
    task, record = pair.submit()
    assert pair.core.receive(pair.outcome(record, state)) == [task]
    assert type(error_of(pair, task)) is kind
    assert pair.core.leased == 0


def test_a_failures_code_and_text_come_from_the_slot(pair: Pair) -> None:
    for text, kind, code in (
        ("INVALID_INPUT\nnot so", InvalidInput, "INVALID_INPUT"),
        ("LICENSE_FAILED\nnot so", Refused, "LICENSE_FAILED"),
        ("MODEL_FAILED\nnot\nso", ModelFailed, "MODEL_FAILED"),
    ):
        task, record = pair.submit()
        pair.core.receive(pair.fail(record, text))
        error = error_of(pair, task)
        assert (type(error), error.code, str(error)) == (kind, code, text.partition("\n")[2])
    assert pair.core.leased == 0


def test_inputs_go_to_the_smallest_size_that_holds_them_and_the_answer(pair: Pair) -> None:
    assert pair.arena.cls[pair.submit(size=100)[1].slot] == 0
    # The answer, of a length nobody knows, is taken to be as long as the inputs.
    assert pair.arena.cls[pair.submit(size=600)[1].slot] == 1
    task, record = pair.submit(size=10_000)
    assert record.spill == ARENA << 32 | 1 and pair.arena.cls[record.slot] == 0
    assert task.spill is not None
    layout = pair.layouts.parse(task.spill.map[: pair.word(record, INPUT)])
    assert layout.views(task.spill.map, 0)["x"][0].tolist() == list(range(10_000))
    pair.core.receive(pair.answer(record, [1]))
    assert outputs(pair, task) == [1]
    assert list(pair.core.dropped) == [record.spill]
    with pytest.raises(TooLarge, match=str(SPILL_LIMIT)):
        pair.submit(size=SPILL_LIMIT // 4)


def test_small_tasks_take_larger_slots_when_theirs_are_out(pair: Pair) -> None:
    sent = [pair.submit() for _ in range(20)]
    assert sorted(pair.arena.cls[record.slot] for _, record in sent) == [0] * 16 + [1] * 4
    assert len({record.slot for _, record in sent}) == 20
    with pytest.raises(Overloaded, match="every slot is taken"):
        pair.submit()
    pair.core.receive(pair.answer(sent[3][1], [1]))
    outputs(pair, sent[3][0])
    assert pair.submit()[1].slot == sent[3][1].slot


def test_a_record_that_found_no_room_is_withdrawn(pair: Pair) -> None:
    for size in (1, 10_000):
        task, record = pair.submit(size=size)
        pair.core.withdraw(task)
        assert (pair.core.leased, pair.core.under_way) == (0, 0)
        assert pair.core.receive(pair.answer(record, [1])) == []
    assert pair.core.leased == 0 and len(pair.core.dropped) == 1


def test_a_body_that_is_given_up_half_copied_spoils_nothing_for_the_next_in_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.arena.STEP", 64)
    pair = Pair("a")

    def gone() -> None:
        raise Cancelled("the client has gone")

    task, record = pair.submit(size=200)
    pair.core.receive(pair.answer(record, [1.0]))
    pair.core.release(task)
    with pytest.raises(Cancelled):
        pair.core.submit_body(pair.core.model("a"), b"[" * 800, "json-row", FAR, 1, gone)
    _, again = pair.submit(size=200)
    assert again.slot == record.slot
    assert (pair.inputs(again)["x"] == np.arange(200)).all()
    pair.close()


def test_outputs_in_a_memory_file(pair: Pair) -> None:
    task, record = pair.submit()
    values = {"y": np.arange(50_000, dtype=np.float32)[None]}
    layout = pair.layouts.of(signature(values))

    def spill() -> int:
        fd = reserve("headrace-spill", layout.size)
        os.pwrite(fd, layout.descriptor, 0)
        os.pwrite(fd, values["y"].tobytes(), layout.tensors[0].offset)
        return fd

    pair.arena.words[(pair.arena.bases[record.slot] >> 3) + OUTPUT] = len(layout.descriptor)
    pair.outcome(record, SlotState.SPILLED)
    pair.arena.words[OVERFLOW] = 1
    assert pair.core.receive(b"") == [], "the file is still to come"
    assert pair.core.spilled(record.slot, record.seq + 1, spill()) == []
    assert pair.core.spilled(record.slot, record.seq, spill()) == [task]
    assert pair.core.spilled(record.slot, record.seq, spill()) == [], "said twice"
    assert (pair.core.arrays(task)["y"] == values["y"]).all()
    pair.core.release(task)
    assert pair.core.leased == 0


def test_one_model_cannot_take_every_slot() -> None:
    pair = Pair("a", "b")
    try:
        with pytest.raises(Overloaded):
            for _ in range(21):
                pair.submit("a")
        held = pair.core.leased
        # A quarter of the sixteen small ones is shared out, two for each; the four large ones are too few for that.
        assert held == 18
        for _ in range(2):
            pair.submit("b")
        with pytest.raises(Overloaded):
            pair.submit("b")
        assert pair.core.leased == 20
    finally:
        pair.close()


def test_slots_kept_for_a_model_come_back_to_it() -> None:
    pair = Pair("a", "b")
    try:
        sent = [pair.submit("a") for _ in range(18)]
        for task, record in sent:
            pair.core.receive(pair.answer(record, [1]))
            outputs(pair, task)
        assert len({pair.submit("b")[1].slot for _ in range(18)}) == 18
        with pytest.raises(Overloaded):
            pair.submit("b")
        assert len({pair.submit("a")[1].slot for _ in range(2)}) == 2
    finally:
        pair.close()


@pytest.mark.parametrize("how", ["expire", "cancel"])
def test_a_queue_full_of_what_was_given_up_is_not_full(pair: Pair, how: str) -> None:
    view = pair.core.model("a")
    sent = [pair.submit(deadline_ns=5) for _ in range(3)]
    with pytest.raises(Overloaded):
        view.admit(3, 0)
    if how == "expire":
        pair.core.expire(5)
    else:
        pair.core.abandon(sent[0][0], Cancelled())
    view.admit(3, 0)
    for task, record in sent:
        pair.core.receive(pair.outcome(record, SlotState.CANCELLED))
        pair.core.release(task)
    with pytest.raises(Overloaded):
        view.admit(3, 0)
    assert not view.abandoned


def test_admission_follows_the_pools_last_word() -> None:
    pair = Pair("a")
    try:
        view = pair.core.model("a")
        view.admit(2, 0)
        with pytest.raises(Overloaded, match="the queue of model 'a' is full"):
            view.admit(3, 0)
        for state, kind, text in (
            (State.LOADING, NotReady, "model 'a' is loading: why"),
            (State.CRASH_LOOPED, NotReady, "model 'a' is crash-looped: why"),
            (State.DRAINING, Draining, "the pool is draining"),
            (State.REFUSED, Refused, "why"),
        ):
            view.update(status("a", state, "why", "NO"))
            with pytest.raises(kind) as raised:
                view.admit(0, 0)
            assert str(raised.value) == text
        assert raised.value.code == "NO"
        view.update(status("a", State.RESTARTING))
        view.admit(0, 0)
        with pytest.raises(ModelNotFound, match="there is no model 'z'"):
            pair.core.model("z")
    finally:
        pair.close()


def test_an_answer_not_taken_before_the_end_is_lost(pair: Pair) -> None:
    task, record = pair.submit()
    pair.core.receive(pair.answer(record, [1]))
    pair.core.close()
    assert type(error_of(pair, task)) is PoolLost

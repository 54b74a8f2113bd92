"""Streams from compute processes, and what every client makes of them. Run as it is for threads, and under `python -m
gevent.monkey --module pytest` for gevent's hub."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.models.talk import (
    BAD_TEXT,
    DIE,
    ENDLESS,
    HANG,
    HOLD,
    LEAVE,
    NO_PIECE,
    RAISE,
    RAISE_ALL,
    REFUSE,
    TOO_FEW,
    ask,
    piece,
)
from tests.workers.drivers import Call, Driver, client_of
from tests.workers.pools import (
    SMALL_ARENA,
    PoolProcess,
    arenas,
    core,
    pool,
    queued,
    send,
    statuses,
    until,
    wait_free,
    wait_replicas,
)
from workers import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidInput,
    ModelFailed,
    Overloaded,
    PoolError,
    PoolLost,
    Refused,
    WorkerDied,
)
from workers.connection import Connection
from workers.pieces import Pieces
from workers.records import PIECE_COST, WINDOW, SlotState

TALK = "tests.models.talk:"
FORMS = ("talk", "steps")
ARENA = {"slots": [[4096, 400], [65536, 16], [1048576, 2]], "spill_limit": 16 << 20}


class Place:
    """Where the pool's models keep their diary, and look for what opens their gate."""

    def __init__(self, path: Path) -> None:
        self.diary = path / "diary"
        self.gate = path / "gate"

    def notes(self, word: str) -> list[int]:
        lines = self.diary.read_text().splitlines() if self.diary.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(word + " ") and line.split()[1] != "0"]

    def forget(self) -> None:
        self.diary.unlink(missing_ok=True)
        self.gate.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("talk"))


@pytest.fixture(scope="module")
def running(place: Place) -> Iterator[PoolProcess]:
    options = {"diary": str(place.diary), "gate": str(place.gate)}
    models: dict[str, dict[str, object]] = {
        "talk": {"model": TALK + "Talk", "options": options},
        "steps": {"model": TALK + "Steps", "options": options},
        "few": {"model": TALK + "Steps", "max_streams": 2, "max_queue": 3, "options": options},
        "few-gathered": {
            "model": TALK + "Steps",
            "max_streams": 2,
            "max_queue": 3,
            "max_delay_ms": 20,
            "options": options,
        },
        "both": {"model": TALK + "Both", "options": options},
        "both-gathered": {"model": TALK + "Both", "max_delay_ms": 1000, "max_batch": 4, "options": options},
        "slow-start": {"model": TALK + "Both", "options": options | {"start_ms": 50}},
        "reads": {"model": TALK + "Reads"},
        "quick": {"model": TALK + "Talk", "timeout_s": 0.5, "options": options},
        "quick-steps": {"model": TALK + "Steps", "timeout_s": 0.5, "options": options},
        "echo": {"model": "Echo"},
    }
    with pool(models, ARENA) as it, client_of(it.socket_path) as client:
        wait_replicas(client, *models)
        yield it


@pytest.fixture
def client(running: PoolProcess, place: Place) -> Iterator[Driver]:
    place.forget()
    with client_of(running.socket_path) as it:
        until(lambda: statuses(it), "it has met the pool")
        wait_replicas(it, *statuses(it))
        yield it
        wait_free(it)


def pieces(nonce: int, count: int, size: int = 0) -> list[bytes]:
    return [piece(nonce, number, size) for number in range(count)]


def cut(stream: Pieces) -> tuple[list[bytes], PoolError]:
    """What came, and why no more did."""
    came = []
    with pytest.raises(PoolError) as caught:
        came.extend(stream)
    assert stream.ended and stream.failure() is caught.value
    return came, caught.value


def begun(stream: Pieces) -> bytes:
    """Its first piece, which has come."""
    assert stream.wait(20)
    return next(stream)


# What comes.


@pytest.mark.parametrize("model", FORMS)
@pytest.mark.parametrize("nonce", [7, 8])
def test_pieces_come_whole_and_in_order(client: Driver, model: str, nonce: int) -> None:
    stream = client.stream(model, ask(nonce, 20))
    assert list(stream) == pieces(nonce, 20)
    assert stream.ended and stream.failure() is None and stream.take() == []
    assert list(stream) == [], "asked again"
    assert core(client).leased == 0, "the slot is free once the end has been seen"


@pytest.mark.parametrize("model", FORMS)
@pytest.mark.parametrize("size", [4079, 4080, 4081, 8161, WINDOW, 1_000_000])
def test_pieces_of_any_size(client: Driver, model: str, size: int) -> None:
    assert list(client.stream(model, ask(3, 4, size=size))) == pieces(3, 4, size)


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_without_pieces_is_complete(client: Driver, model: str) -> None:
    stream = client.stream(model, ask(4, 0))
    assert list(stream) == [] and stream.ended and stream.failure() is None


@pytest.mark.parametrize("model", FORMS)
def test_many_streams_at_once_each_have_their_own(client: Driver, model: str) -> None:
    calls = [Call(lambda i=i: list(client.stream(model, ask(i, 30 + i)))) for i in range(1, 40)]  # type: ignore[misc]
    assert [call.result() for call in calls] == [pieces(i, 30 + i) for i in range(1, 40)]


@pytest.mark.parametrize("model", FORMS)
def test_one_reader_of_many_streams(client: Driver, model: str) -> None:
    streams = {i: client.stream(model, ask(i, 50)) for i in range(1, 200)}
    came: dict[int, list[bytes]] = {i: [] for i in streams}
    while not all(stream.ended for stream in streams.values()):
        for i, stream in streams.items():
            came[i] += stream.take()
            stream.grant()
        next(stream for stream in [*streams.values()] if not stream.ended or stream is streams[199]).wait(1)
    assert came == {i: pieces(i, 50) for i in streams}
    assert all(stream.failure() is None for stream in streams.values())


@pytest.mark.parametrize("model", FORMS)
def test_two_clients_each_have_their_own(running: PoolProcess, client: Driver, model: str) -> None:
    with client_of(running.socket_path) as other:
        wait_replicas(other, model)
        both = [(each, 10 * i + k) for i in range(1, 20) for k, each in enumerate((client, other))]
        streams = [(nonce, each.stream(model, ask(nonce, 20))) for each, nonce in both]
        assert all(list(stream) == pieces(nonce, 20) for nonce, stream in streams)
        wait_free(other)


def test_inputs_of_any_size_stay_to_the_end(client: Driver) -> None:
    for length in (1, 10_000, 1 << 20):
        x = np.ones((1, length), np.float32)
        stream = client.stream("reads", {"x": x, "pieces": np.array([3000], np.int64)})
        assert set(stream) == {b"%d " % length}


# By whom one waits.


@pytest.mark.parametrize("model", FORMS)
def test_to_wait_is_limited_and_to_take_is_not_to_wait(client: Driver, place: Place, model: str) -> None:
    stream = client.stream(model, ask(5, 3, gate=2))
    assert begun(stream) == piece(5, 0)
    assert not stream.wait(0.01) and not stream.wait(0) and stream.take() == [] and not stream.ended
    assert stream.failure() is None
    place.gate.touch()
    assert stream.wait(None)
    assert list(stream) == [piece(5, 1), piece(5, 2)]
    assert stream.wait(None), "the end is known"


@pytest.mark.parametrize("model", FORMS)
def test_whoever_is_to_be_notified_hears_of_everything_new(client: Driver, place: Place, model: str) -> None:
    stream = client.stream(model, ask(6, 3, gate=2))
    assert stream.wait(20)
    came: list[bytes] = []
    times: list[int] = []

    def heard() -> None:
        times.append(1)
        came.extend(stream.take())
        stream.grant()

    stream.notify(heard)
    assert came == [piece(6, 0)], "what was there is said at once"
    place.gate.touch()
    until(lambda: stream.ended, "the end has come")
    assert came == pieces(6, 3)
    stream.notify(None)
    stream.notify(heard)
    assert times, "and at once when all is over"
    stream.close()


def test_one_whose_notification_fails_keeps_nobody_from_hearing(
    client: Driver, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    log = logging.getLogger("headrace.client")
    monkeypatch.setattr(log, "error", lambda text, *_, **__: logged.append(text))  # a traceback leads to the connection
    bad, good = client.stream("steps", ask(1, 3, gate=2)), client.stream("steps", ask(2, 3, gate=2))
    assert begun(bad) and begun(good)

    def fail() -> None:
        raise RuntimeError("not today")

    bad.notify(fail)
    place.gate.touch()
    assert list(good) == [piece(2, 1), piece(2, 2)]
    bad.notify(None)
    assert list(bad) == [piece(1, 1), piece(1, 2)]
    assert set(logged) == {"whoever was to hear of a stream failed"}


# Side by side.


def test_one_that_sleeps_holds_up_no_other(client: Driver, place: Place) -> None:
    asleep = client.stream("talk", ask(1, 2, gate=2))
    assert begun(asleep) == piece(1, 0)
    for nonce in range(2, 6):
        assert list(client.stream("talk", ask(nonce, 40))) == pieces(nonce, 40)
    assert asleep.take() == []
    place.gate.touch()
    assert list(asleep) == [piece(1, 1)]


def test_all_streams_share_each_step(client: Driver, place: Place) -> None:
    streams = [client.stream("steps", ask(i, 30, gate=1)) for i in range(1, 21)]
    until(lambda: 20 in place.notes("step"), "all take part")
    before = len(place.notes("step"))
    place.gate.touch()
    for i, stream in enumerate(streams, 1):
        assert list(stream) == pieces(i, 30)
    steps = place.notes("step")[before:]
    assert 29 <= steps.count(20) <= 31
    assert len(steps) <= 33, "as many as the longest stream has pieces, not as all have together"


def test_who_joins_later_shares_the_steps_and_who_has_left_does_not(client: Driver, place: Place) -> None:
    long = client.stream("steps", ask(1, 2, gate=2))
    assert begun(long)
    assert list(client.stream("steps", ask(2, 25))) == pieces(2, 25)
    assert place.notes("step").count(2) in (25, 26)
    place.gate.touch()
    assert list(long) == [piece(1, 1)]


@pytest.mark.parametrize("model", FORMS)
def test_each_stream_that_was_started_is_stopped_once_however_it_ended(
    client: Driver, place: Place, model: str
) -> None:
    now = time.monotonic()
    ends = {
        1: client.stream(model, ask(1, 3)),
        2: client.stream(model, ask(2, 3)),
        3: client.stream(model, ask(3, 3, wrong=RAISE, at=1)),
        4: client.stream(model, ask(4, 3, wrong=NO_PIECE, at=1)),
        5: client.stream(model, ask(5, ENDLESS), deadline=now + 0.3),
        6: client.stream(model, ask(6, ENDLESS)),
    }
    begun(ends[6])
    ends[6].close()
    for nonce in (3, 4, 5):
        cut(ends[nonce])
    assert list(ends[1]) + list(ends[2]) == pieces(1, 3) + pieces(2, 3)
    wait_free(client)
    until(lambda: sorted(place.notes("stop")) == [1, 2, 3, 4, 5, 6], f"stopped: {place.notes('stop')}")
    assert sorted(place.notes("start")) == [1, 2, 3, 4, 5, 6]


def test_predictions_go_on_beside_streams(client: Driver) -> None:
    x = {"x": np.array([1.5], np.float32)}
    inputs = {"nonce": 1, "pieces": ENDLESS, "size": 0, "wrong": 0, "at": 0, "gate": 0}
    streams = [client.stream("both", ask(i, ENDLESS) | x) for i in range(1, 11)]
    calls = [Call(lambda stream=stream: [next(stream) for _ in range(200)]) for stream in streams]  # type: ignore[misc]
    row = {name: np.array([value], np.int64) for name, value in inputs.items()} | x
    for _ in range(50):
        assert client.predict("both", row)["y"] == [1.5]
    for i, call in enumerate(calls, 1):
        assert call.result() == pieces(i, 200)
        streams[i - 1].close()


def test_a_stream_is_not_kept_waiting_for_a_batch_to_fill(client: Driver) -> None:
    row = ask(1, 2) | {"x": np.ones(1, np.float32)}
    begin = time.monotonic()
    assert list(client.stream("both-gathered", row)) == pieces(1, 2)
    assert list(client.stream("few-gathered", ask(1, 2))) == pieces(1, 2)
    call = Call(lambda: client.predict("both-gathered", row))
    until(lambda: core(client).under_way == 1 and queued(client, "both-gathered") == 0, "a batch is being gathered")
    assert list(client.stream("both-gathered", row)) == pieces(1, 2)
    assert time.monotonic() - begin < 0.5
    assert call.result()["y"] == [1]


def test_those_that_join_hold_up_the_live_ones_for_one_start_at_most(
    client: Driver, running: PoolProcess, place: Place
) -> None:
    row = {"x": np.ones(1, np.float32)}
    worker = running.worker("slow-start")
    live = client.stream("slow-start", ask(1, ENDLESS) | row)
    assert begun(live)
    send(worker, signal.SIGSTOP)
    joining = [client.stream("slow-start", ask(i, 2) | row) for i in range(2, 9)]
    expired = Call(lambda: client.predict("slow-start", ask(9, 2) | row, deadline=time.monotonic() + 0.2))
    until(lambda: queued(client, "slow-start") >= 7, "all are queued")
    place.forget()
    send(worker, signal.SIGCONT)
    for i, stream in enumerate(joining, 2):
        assert list(stream) == pieces(i, 2)
    assert isinstance(expired.failure(), DeadlineExceeded)
    live.close()
    lines = [line.split()[0] for line in place.diary.read_text().splitlines()]
    assert "predict" not in lines, "it has expired while others began"
    assert "start start" not in " ".join(lines), "there is a step between any two of them"


# Credit.


@pytest.mark.parametrize("model", FORMS)
def test_no_more_is_made_than_the_reader_has_credit_for(client: Driver, model: str) -> None:
    stream = client.stream(model, ask(1, ENDLESS, size=1000))
    window = -(-WINDOW // (1000 + PIECE_COST))
    came: list[bytes] = []

    def fill(count: int) -> None:
        until(lambda: len(came) + len(stream._task.pieces or ()) == count, f"{count} pieces")
        # Another stream has its turns meanwhile, by the same worker and pipe.
        assert list(client.stream(model, ask(2, 300))) == pieces(2, 300)
        assert len(came) + len(stream._task.pieces or ()) == count

    fill(window)
    came += stream.take()
    fill(window)
    stream.grant()
    fill(2 * window)
    came += stream.take()
    stream.close()
    assert came == pieces(1, 2 * window, 1000)


@pytest.mark.parametrize("model", FORMS)
def test_one_that_waits_for_credit_can_be_cancelled_and_can_expire(client: Driver, model: str) -> None:
    cancelled = client.stream(model, ask(1, ENDLESS, size=20_000))
    expiring = client.stream(model, ask(2, ENDLESS, size=20_000), deadline=time.monotonic() + 0.3)
    for stream in (cancelled, expiring):
        until(lambda stream=stream: len(stream._task.pieces or ()) == 1, "the window is full")  # type: ignore[misc]
    cancelled.close()
    until(lambda: core(client).under_way == 1, "its slot is free")
    came, error = cut(expiring)
    assert came[0] == piece(2, 0, 20_000) and isinstance(error, DeadlineExceeded)


# Ends before the end.


@pytest.mark.parametrize("model", FORMS)
def test_a_slot_is_free_at_once_after_the_piece_that_follows_a_cancel(client: Driver, model: str) -> None:
    taken = []
    for nonce in range(1, 6):
        stream = client.stream(model, ask(nonce, ENDLESS))
        begun(stream)
        begin = time.monotonic()
        stream.close()
        stream.close()
        assert stream.ended and isinstance(stream.failure(), Cancelled) and stream.take() == []
        wait_free(client)
        taken.append(time.monotonic() - begin)
    assert min(taken) < 0.1


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_that_is_forgotten_is_cancelled(client: Driver, model: str) -> None:
    stream = client.stream(model, ask(1, ENDLESS))
    begun(stream)
    del stream
    gc.collect()
    wait_free(client)


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_whose_caller_hangs_up_is_cancelled(client: Driver, place: Place, model: str) -> None:
    near, far = socket.socketpair()
    with near:
        stream = client.stream(model, ask(1, ENDLESS, gate=2), caller=near)
        begun(stream)
        far.close()
        came, error = cut(stream)
    assert (came, type(error)) == ([], Cancelled)
    place.gate.touch()


def test_who_waits_hears_of_a_close(client: Driver, place: Place) -> None:
    stream = client.stream("steps", ask(1, 3, gate=1))
    call = Call(lambda: list(stream))
    until(lambda: stream._task.wakes or client._reader.locked(), "it waits")  # type: ignore[attr-defined]
    stream.close()
    assert isinstance(call.failure(), Cancelled)


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_ends_at_its_deadline(client: Driver, model: str) -> None:
    stream = client.stream(model, ask(1, ENDLESS), deadline=time.monotonic() + 0.3)
    came, error = cut(stream)
    assert came == pieces(1, len(came)) and came
    assert isinstance(error, DeadlineExceeded)


@pytest.mark.parametrize("model", FORMS)
@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (RAISE, ModelFailed, "lost the thread"),
        (REFUSE, Refused, "not this one"),
        (NO_PIECE, ModelFailed, "not str or bytes"),
        (BAD_TEXT, ModelFailed, "no text"),
    ],
)
def test_a_model_that_fails_at_a_piece_fails_that_stream_alone(
    client: Driver, place: Place, model: str, wrong: int, kind: type[PoolError], text: str
) -> None:
    beside = client.stream(model, ask(2, 9, gate=2))
    assert begun(beside)
    came, error = cut(client.stream(model, ask(1, 9, wrong=wrong, at=3)))
    assert (came, type(error)) == (pieces(1, 3), kind) and text in str(error)
    assert wrong != REFUSE or error.code == "NOT_THIS_ONE"
    came, error = cut(client.stream(model, ask(3, 9, wrong=wrong, at=0)))
    assert (came, type(error)) == ([], kind) and text in str(error)
    place.gate.touch()
    assert list(beside) == pieces(2, 9)[1:]


def test_a_stream_that_cannot_start_fails_alone(client: Driver) -> None:
    came, error = cut(client.stream("steps", ask(1, 9, wrong=RAISE, at=-1)))
    assert (came, str(error)) == ([], "cannot start")


@pytest.mark.parametrize(("wrong", "text"), [(RAISE_ALL, "lost them all"), (TOO_FEW, "1 pieces for 2 streams")])
def test_a_step_that_fails_fails_all_its_streams_and_the_model_goes_on(
    client: Driver, place: Place, wrong: int, text: str
) -> None:
    streams = [client.stream("steps", ask(i, 9, wrong=wrong if i == 2 else 0, at=1, gate=2)) for i in (1, 2)]
    for stream in streams:
        assert begun(stream)
    place.gate.touch()
    for stream in streams:
        came, error = cut(stream)
        assert came == [] and isinstance(error, ModelFailed) and text in str(error)
    assert list(client.stream("steps", ask(3, 3))) == pieces(3, 3)
    until(lambda: sorted(place.notes("stop")) == [1, 2, 3], "each was stopped once")


def test_what_a_model_does_not_do_is_said_at_once(client: Driver) -> None:
    with pytest.raises(InvalidInput, match="'echo' does not stream"):
        client.stream("echo", {"x": np.ones((1, 1), np.float32)})
    with pytest.raises(InvalidInput, match="'talk' does not predict"):
        client.predict("talk", ask(1, 1))
    with pytest.raises(InvalidInput, match="2 rows"):
        client.stream("talk", {name: np.repeat(value, 2) for name, value in ask(1, 1).items()})
    with pytest.raises(InvalidInput, match="'at' is missing"):
        client.stream("talk", {name: value for name, value in ask(1, 1).items() if name != "at"})
    with pytest.raises(InvalidInput, match="does not predict"):
        client.predict_body("talk", json.dumps({name: int(v[0]) for name, v in ask(1, 1).items()}).encode(), "json-row")


# Death.


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_that_has_begun_dies_with_its_worker_and_one_that_has_not_is_run_again(
    client: Driver, running: PoolProcess, place: Place, model: str
) -> None:
    streams = [client.stream(model, ask(1, 9, gate=3)), client.stream(model, ask(2, 9, gate=1))]
    until(lambda: len(streams[0]._task.pieces or ()) == 2, "one has begun")
    until(lambda: sorted(place.notes("start")) == [1, 2], "the other has been taken")
    send(running.worker(model), signal.SIGKILL)
    came, error = cut(streams[0])
    assert (came, type(error)) == (pieces(1, 2), WorkerDied)
    assert str(error) == "the worker died while the stream was under way"
    place.gate.touch()
    assert list(streams[1]) == pieces(2, 9)
    assert place.notes("start") in ([1, 2, 2], [2, 1, 2])


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_that_kills_before_its_first_piece_is_run_twice(client: Driver, place: Place, model: str) -> None:
    came, error = cut(client.stream(model, ask(1, 9, wrong=DIE, at=0)))
    assert (came, type(error)) == ([], WorkerDied)
    assert "and so did the next one" in str(error)
    assert place.notes("start") == [1, 1]
    wait_replicas(client, model)


@pytest.mark.parametrize("model", FORMS)
def test_a_stream_that_kills_twice_takes_none_along_that_has_said_nothing(
    client: Driver, running: PoolProcess, model: str
) -> None:
    worker = running.worker(model)
    send(worker, signal.SIGSTOP)
    before, after = ([client.stream(model, ask(i, 3)) for i in some] for some in (range(1, 6), range(6, 11)))
    bad = client.stream(model, ask(99, 3, wrong=DIE, at=0))
    mixed = [*before, *after]
    send(worker, signal.SIGCONT)
    came, error = cut(bad)
    assert (came, type(error)) == ([], WorkerDied)
    for i, stream in enumerate(mixed, 1):
        try:
            assert list(stream) == pieces(i, 3)
        except WorkerDied as died:
            assert "under way" in str(died), "only one that had begun dies along"
    wait_replicas(client, model)


def test_a_stream_that_was_cancelled_is_not_run_again(client: Driver, running: PoolProcess, place: Place) -> None:
    stream = client.stream("talk", ask(1, 9, gate=1))
    until(lambda: place.notes("start") == [1], "it was taken")
    stream.close()
    send(running.worker("talk"), signal.SIGKILL)
    wait_free(client)
    assert list(client.stream("talk", ask(2, 2))) == pieces(2, 2)
    assert place.notes("start") == [1, 2]


def test_an_iterator_that_does_not_come_back_costs_its_worker_after_a_while(
    client: Driver, running: PoolProcess
) -> None:
    worker = running.worker("quick")
    hung, beside = (client.stream("quick", ask(i, 9, wrong=HANG, at=1)) for i in (1, 2))
    assert begun(hung) and begun(beside)
    assert not beside.wait(0.7), "silence is no fault"
    assert running.worker("quick") == worker
    hung.close()
    assert not beside.wait(0.9), "while another is live, it has time"
    assert running.worker("quick") == worker
    assert list(client.stream("quick", ask(3, 3))) == pieces(3, 3)
    beside.close()
    until(lambda: running.workers("quick") not in ([], [worker]), "it is replaced")
    wait_replicas(client, "quick")


@pytest.mark.parametrize("model", FORMS)
def test_a_model_that_keeps_the_interpreter_to_itself_has_its_time(
    client: Driver, running: PoolProcess, model: str
) -> None:
    worker = running.worker(model)
    beside, holding = client.stream(model, ask(1, ENDLESS)), client.stream(model, ask(2, 3, wrong=HOLD, at=1))
    assert begun(beside)
    assert list(holding) == pieces(2, 3)
    assert running.worker(model) == worker
    beside.close()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("model", FORMS)
def test_an_exception_of_any_kind_ends_a_stream_and_leaves_the_worker(
    client: Driver, running: PoolProcess, model: str, at: int
) -> None:
    worker = running.worker(model)
    came, error = cut(client.stream(model, ask(1, 9, wrong=LEAVE, at=at), deadline=time.monotonic() + 10))
    assert (came, type(error), str(error)) == (pieces(1, at), ModelFailed, "let go")
    assert list(client.stream(model, ask(2, 3))) == pieces(2, 3)
    assert running.worker(model) == worker


def test_a_step_that_does_not_come_back_costs_its_worker(client: Driver) -> None:
    came, error = cut(client.stream("quick-steps", ask(1, 9, wrong=HANG, at=1)))
    assert (came, type(error)) == (pieces(1, 1), WorkerDied)
    wait_replicas(client, "quick-steps")


@pytest.mark.parametrize("model", FORMS)
def test_streams_of_a_client_that_has_gone_are_stopped(
    client: Driver, running: PoolProcess, place: Place, model: str
) -> None:
    ours = client.stream(model, ask(1, 9, gate=2))
    assert begun(ours)
    with client_of(running.socket_path) as other:
        wait_replicas(other, model)
        theirs = [other.stream(model, ask(i, ENDLESS, size=size)) for i, size in ((2, 0), (3, 30_000))]
        for stream in theirs:
            begun(stream)
    assert isinstance(theirs[0].failure() or cut(theirs[0])[1], PoolLost)
    until(lambda: sorted(place.notes("stop")) == [2, 3], "both were stopped")
    place.gate.touch()
    assert list(ours) == pieces(1, 9)[1:]


@pytest.mark.parametrize("model", FORMS)
def test_an_idle_worker_keeps_nothing_of_streams_that_have_ended(running: PoolProcess, model: str) -> None:
    with client_of(running.socket_path) as client:
        wait_replicas(client, model)
        until(lambda: arenas(running.worker(model)) == 0, "those of other tests are gone")
        assert list(client.stream(model, ask(1, 3))) == pieces(1, 3)
        assert arenas(running.worker(model)) == 1
        wait_free(client)
    until(lambda: arenas(running.worker(model)) == 0, "the client's memory is let go", 5)


def test_a_worker_killed_by_chance_at_any_moment_costs_no_slot_and_no_piece(
    client: Driver, running: PoolProcess
) -> None:
    random = np.random.default_rng(5)
    for _ in range(3):
        streams = {i: client.stream("steps", ask(i, 200)) for i in range(1, 31)}
        calls = {i: Call(lambda stream=stream: list(stream)) for i, stream in streams.items()}  # type: ignore[misc]
        some = streams[int(random.integers(1, 31))]
        until(lambda some=some: some._task.turn, "one has begun")  # type: ignore[misc]
        time.sleep(float(random.random()) * 0.01)
        send(running.worker("steps"), signal.SIGKILL)
        for i, call in calls.items():
            call.join()
            if call.error is None:
                assert call.value == pieces(i, 200)
            else:
                assert isinstance(call.error, WorkerDied)
        wait_replicas(client, "steps")
        wait_free(client)


# Too many.


@pytest.mark.parametrize("model", ["few", "few-gathered"])
def test_streams_over_the_workers_limit_wait_in_the_queue(client: Driver, place: Place, model: str) -> None:
    first = [client.stream(model, ask(i, 9, gate=2)) for i in (1, 2)]
    for stream in first:
        assert begun(stream)
    waiting = [client.stream(model, ask(i, 2)) for i in (3, 4, 5)]
    with pytest.raises(Overloaded, match=f"queue of model '{model}' is full"):
        for i in range(6, 30):
            waiting.append(client.stream(model, ask(i, 2)))
    assert not waiting[0].wait(0.05) and queued(client, model) == len(waiting)
    first[0].close()
    for i, stream in enumerate(waiting, 3):
        assert list(stream) == pieces(i, 2)
    place.gate.touch()
    assert list(first[1]) == pieces(2, 9)[1:]


@pytest.mark.parametrize("model", ["few", "few-gathered"])
def test_more_streams_at_once_than_the_worker_has_places_for(client: Driver, running: PoolProcess, model: str) -> None:
    worker = running.worker(model)
    streams = [client.stream(model, ask(i, 2)) for i in (1, 2, 3)]
    assert [list(stream) for stream in streams] == [pieces(i, 2) for i in (1, 2, 3)]
    assert running.worker(model) == worker


def test_streams_that_were_given_up_at_work_make_no_room_in_the_queue(
    client: Driver, running: PoolProcess, place: Place
) -> None:
    silent = [client.stream("few", ask(i, 2, gate=1)) for i in (1, 2)]
    until(lambda: place.notes("start") == [1, 2], "both have been taken, and have said nothing")
    worker = running.worker("few")
    send(worker, signal.SIGSTOP)
    try:
        for stream in silent:
            stream.close()
        waiting = []
        with pytest.raises(Overloaded):
            for i in range(3, 30):
                waiting.append(client.stream("few", ask(i, 2)))
        assert len(waiting) == 3
        waiting[0].close()
        waiting.append(client.stream("few", ask(9, 2)))
    finally:
        send(worker, signal.SIGCONT)
    assert [list(stream) for stream in waiting[1:]] == [pieces(i, 2) for i in (4, 5, 9)]


def test_streams_over_the_slots_are_refused(client: Driver, place: Place) -> None:
    streams = []
    with pytest.raises(Overloaded, match="every slot is taken"):
        for i in range(1, 1000):
            streams.append(client.stream("steps", ask(i, 9, gate=2)))
            assert begun(streams[-1]) == piece(i, 0)
    assert len(streams) > 200
    assert client.predict("echo", {"x": np.ones((1, 1), np.float32)})["y"] == 1, "other models have some left"
    place.gate.touch()
    for i, stream in enumerate(streams, 1):
        assert list(stream) == pieces(i, 9)[1:]


class Deaf:
    """A client by hand, which reads when it is told to, and `count` streams of `steps`; its reply pipe is full."""

    def __init__(self, running: PoolProcess, client: Driver, count: int, pieces: int) -> None:
        self._connection = Connection(running.socket_path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        until(lambda: self._connection.hear() == [] and self._connection.ready, "it is connected")
        assert self._connection.core is not None
        self.core = self._connection.core
        self.tasks = {}
        for i in range(1, count + 1):
            task, record = self._connection.prepare_stream("steps", ask(i, pieces, size=900), None)
            self._connection.enqueue("steps", task, record)
            self.tasks[i] = task
            until(lambda: queued(client, "steps") == 0, "it has been taken")
        words, streaming = self.core.arena.words, SlotState.STREAMING
        until(lambda: all(words[t.base >> 3] & 0xFF == streaming for t in self.tasks.values()), "all have begun")
        write = self._connection._reply_write
        until(lambda: not select.select([], [write], [], 0)[1], "the pipe is full")
        self.came: dict[int, list[bytes]] = {i: [] for i in self.tasks}

    def read_all(self) -> None:
        """Until every stream has ended."""
        os.set_blocking(self._connection.reply, False)
        until(self._read, "every stream has ended")

    def _read(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                self.core.receive(os.read(self._connection.reply, 4096))
        for i, task in self.tasks.items():
            self.came[i] += self.core.take(task)
            self.core.grant(task)
        return self.core.under_way == 0

    def close(self) -> None:
        for task in self.tasks.values():
            self.core.release(task)
        assert self.core.leased == 0
        self._connection.close()


def test_a_client_that_does_not_read_holds_up_nobody_and_loses_nothing(client: Driver, running: PoolProcess) -> None:
    deaf = Deaf(running, client, 250, 20)
    assert list(client.stream("steps", ask(999, 300))) == pieces(999, 300)
    deaf.core.abandon(deaf.tasks.pop(250), Cancelled("not wanted"))
    deaf.read_all()
    for i, task in deaf.tasks.items():
        assert deaf.came[i] == pieces(i, 20, 900) and deaf.core.failure(task) is None
    deaf.close()


def test_a_client_that_did_not_read_hears_of_its_workers_death_behind_the_pieces(
    client: Driver, running: PoolProcess
) -> None:
    deaf = Deaf(running, client, 250, ENDLESS)
    send(running.worker("steps"), signal.SIGKILL)
    wait_replicas(client, "steps")
    assert list(client.stream("steps", ask(999, 3))) == pieces(999, 3)
    deaf.read_all()
    for i, task in deaf.tasks.items():
        assert deaf.came[i] == pieces(i, len(deaf.came[i]), 900)
        assert isinstance(deaf.core.failure(task), WorkerDied)
    deaf.close()


# Ends.


def test_a_pool_that_drains_lets_streams_come_to_their_end(place: Place) -> None:
    place.forget()
    model = {"model": TALK + "Steps", "options": {"gate": str(place.gate)}}
    with pool({"steps": model}, SMALL_ARENA) as running, client_of(running.socket_path) as client:
        wait_replicas(client, "steps")
        stream = client.stream("steps", ask(1, 9, gate=2))
        assert begun(stream)
        running.process.terminate()
        until(lambda: refused(client), "no more are taken")
        assert not stream.wait(0.05)
        place.gate.touch()
        assert list(stream) == pieces(1, 9)[1:]
        assert running.process.wait(20) == 0


@pytest.mark.parametrize("model", ["Talk", "Steps"])
def test_a_pool_that_ends_tells_the_streams_it_cuts(place: Place, model: str) -> None:
    place.forget()
    options = {"gate": str(place.gate)}
    with pool({"m": {"model": TALK + model, "options": options}}, SMALL_ARENA) as running:
        with client_of(running.socket_path) as client:
            wait_replicas(client, "m")
            stream = client.stream("m", ask(1, 9, gate=3))
            until(lambda: len(stream._task.pieces or ()) == 2, "it has begun")
            running.process.terminate()
            until(lambda: refused(client), "it drains")
            running.process.terminate()
            came, error = cut(stream)
            assert (came, type(error)) == (pieces(1, 2), Draining)
        assert running.process.wait(20) == 0


def refused(client: Driver) -> bool:
    try:
        client.admit("steps" if "steps" in statuses(client) else "m")
    except PoolError:
        return True
    return False


def test_a_pool_that_is_killed_ends_every_stream(place: Place) -> None:
    place.forget()
    with pool({"talk": {"model": TALK + "Talk"}}, SMALL_ARENA) as running, client_of(running.socket_path) as client:
        wait_replicas(client, "talk")
        stream = client.stream("talk", ask(1, ENDLESS))
        assert begun(stream)
        running.kill()
        came, error = cut(stream)
        assert came == pieces(1, len(came) + 1)[1:] and isinstance(error, PoolLost)


def test_a_caller_from_before_the_pool_was_lost_takes_nothing_along_when_it_leaves(place: Place) -> None:
    place.forget()
    near, far = socket.socketpair()
    model = {"model": TALK + "Talk", "options": {"gate": str(place.gate)}}
    with near, pool({"talk": model}, SMALL_ARENA) as running, client_of(running.socket_path) as client:
        wait_replicas(client, "talk")
        old = client.stream("talk", ask(1, ENDLESS), caller=near)
        assert begun(old)
        running.kill()
        until(lambda: old._task.error, "it has been cut")
        running.start()
        wait_replicas(client, "talk")
        new = client.stream("talk", ask(2, 3, gate=2))
        assert begun(new) and new._task.seq == old._task.seq
        far.close()
        assert not new.wait(0.5)
        place.gate.touch()
        assert list(new) == pieces(2, 3)[1:]
        old.close()

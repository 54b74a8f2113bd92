"""What pool, clients and workers say to each other, over a pair of sockets."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from tests.workers.drivers import Call
from tests.workers.pools import until
from workers import ModelStatus, State, TensorSpec, control

SPECS = (TensorSpec("x", "float32", (-1, 3)), TensorSpec("y", "bool"))
STATUS = ModelStatus("m", State.CRASH_LOOPED, "näh\n\ud800", "C", 2, 1, 7, 1.5, 32, 256, SPECS, ())
VALUES = {
    "bool": True,
    "int": (1 << 64) - 1,
    "str": "näh\n\ud800",
    "float": 1.5,
    "ModelStatus": STATUS,
    "tuple[TensorSpec, ...]": SPECS,
    "tuple[tuple[int, int], ...]": ((4096, 2), (65536, 1)),
}
EXAMPLES: list[Any] = [cls(*[VALUES[str(f.type)] for f in fields(cls)]) for cls in control.Message.__args__]


@pytest.fixture
def pair() -> Iterator[tuple[control.Link, control.Link]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = control.Link(a), control.Link(b)
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: Any, pair: tuple[control.Link, control.Link]) -> None:
    assert control.decode(control.encode(message)) == message
    ours, theirs = pair
    ours.send(message)
    assert theirs.receive() == (message, [])


def test_descriptors_travel_along_and_are_closed_here(pair: tuple[control.Link, control.Link]) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    ours.send(control.Queue("m"), [write])
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(write)
    heard = theirs.receive()
    assert heard is not None
    message, (there,) = heard
    assert message == control.Queue("m") and not os.get_inheritable(there)
    os.write(there, b"x")
    os.close(there)
    assert os.read(read, 2) == b"x" and os.read(read, 2) == b""
    os.close(read)


def test_what_cannot_be_sent_waits_its_turn_in_order(pair: tuple[control.Link, control.Link]) -> None:
    ours, theirs = pair
    count = 3000
    sent = [ours.send(control.DropSpill(n)) for n in range(count)]
    assert sent == sorted(sent, reverse=True) and set(sent) == {True, False} and not ours.stuck
    heard = []
    while len(heard) < count:
        with contextlib.suppress(BlockingIOError):
            while True:
                got = theirs.receive()
                assert got is not None
                heard.append(got[0])
        ours.flush()
    assert heard == [control.DropSpill(n) for n in range(count)]
    assert ours.send(control.Settled())


def test_one_that_never_reads_is_given_up(pair: tuple[control.Link, control.Link]) -> None:
    ours, _ = pair
    sent = 0
    while not ours.stuck:
        ours.send(control.Settled())
        sent += 1
        assert sent < 20_000
    assert sent > control.Link.MOST_WAITING


def test_descriptors_that_wait_are_closed_with_the_link(pair: tuple[control.Link, control.Link]) -> None:
    ours, _ = pair
    while ours.send(control.Settled()):
        pass
    read, write = os.pipe()
    ours.send(control.Queue("m"), [write])
    ours.close()
    assert os.read(read, 1) == b"", "no writer is left"
    os.close(read)


def test_threads_that_send_at_once_lose_and_double_nothing(pair: tuple[control.Link, control.Link]) -> None:
    ours, theirs = pair
    each, senders = 500, 6

    def send(sender: int) -> None:
        for n in range(each):
            ours.send(control.DropSpill(sender * each + n))

    calls = [Call(lambda sender=sender: send(sender)) for sender in range(senders)]  # type: ignore[misc]
    heard: list[int] = []

    def all_heard() -> bool:
        with contextlib.suppress(BlockingIOError):
            while (got := theirs.receive()) is not None:
                assert isinstance(got[0], control.DropSpill)
                heard.append(got[0].spill)
        ours.flush()
        return len(heard) >= each * senders

    until(all_heard, "every message")
    for call in calls:
        call.result()
    assert sorted(heard) == list(range(each * senders))


def test_the_end_of_the_other_side_is_none_and_sending_to_it_harmless(pair: tuple[control.Link, control.Link]) -> None:
    ours, theirs = pair
    theirs.close()
    read, write = os.pipe()
    ours.send(control.Queue("m"), [write])
    assert os.read(read, 1) == b""
    os.close(read)
    assert ours.receive() is None


def test_all_that_was_said_is_heard_and_what_nobody_takes_is_closed(pair: tuple[control.Link, control.Link]) -> None:
    ours, theirs = pair
    read, write = os.pipe()
    other_read, other_write = os.pipe()
    heard: list[control.Message] = []
    taken: list[int] = []

    def heed(message: control.Message, fds: list[int]) -> None:
        heard.append(message)
        if message == control.Queue("taken"):
            taken.append(fds.pop())
        if message == control.Queue("bad"):
            raise ValueError("no such model")

    assert theirs.hear(heed) and heard == []
    ours.send(control.Queue("taken"), [write])
    ours.send(control.Settled())
    assert theirs.hear(heed) and heard == [control.Queue("taken"), control.Settled()]
    ours.send(control.Queue("bad"), [other_write])
    with pytest.raises(ValueError, match="no such model"):
        theirs.hear(heed)
    assert os.read(other_read, 1) == b"", "no writer is left"
    ours.send(control.CloseQueues())
    ours.close()
    assert not theirs.hear(heed) and heard[-1] == control.CloseQueues()
    os.write(taken[0], b"x")
    assert os.read(read, 2) == b"x"
    for fd in (read, other_read, *taken):
        os.close(fd)


@pytest.mark.parametrize("packet", [b"x", b"[]", b'["Nobody",{}]', b'["Queue",{}]', b'["Queue",5]'])
def test_descriptors_that_come_with_nonsense_are_closed(packet: bytes) -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        read, write = os.pipe()
        socket.send_fds(a, [packet], [write])
        os.close(write)
        with pytest.raises((ValueError, LookupError, TypeError)):
            control.receive(b)
        assert os.read(read, 1) == b"", "no writer is left"
        os.close(read)


def test_a_reopened_pipe_has_flags_of_its_own() -> None:
    read, write = os.pipe()
    other = control.reopen(write, os.O_WRONLY | os.O_NONBLOCK)
    assert (os.get_blocking(write), os.get_blocking(other), os.get_inheritable(other)) == (True, False, False)
    for fd in (read, write, other):
        os.close(fd)

"""Answers that wait for the end of a turn."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from types import SimpleNamespace

import gevent
from gevent.socket import socketpair
from gunicorn.config import Config

from service.answer import Answer as RealAnswer
from service.config import Settings
from service.connection import ClientGone, Doorbell, Reader
from service.outbox import Outbox
from service.plain import HeadReader


class Loop:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def turn(self) -> int:
        """How many were called."""
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()
        return len(callbacks)


class Answer:
    def __init__(self, name: str, sent: list[str], then: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.sent = sent
        self.then = then

    def send_posted(self) -> None:
        self.sent.append(self.name)
        self.then()


def test_the_answers_of_a_turn_leave_together_and_in_order() -> None:
    loop, sent = Loop(), list[str]()
    outbox = Outbox(lambda flush: loop.callbacks.append(flush))
    for name in "abc":
        outbox.post(Answer(name, sent))
    assert sent == []
    assert loop.turn() == 1
    assert sent == ["a", "b", "c"]
    assert loop.turn() == 0


def test_what_is_posted_while_answers_leave_is_for_the_next_turn() -> None:
    loop, sent = Loop(), list[str]()
    outbox = Outbox(lambda flush: loop.callbacks.append(flush))
    outbox.post(Answer("a", sent, lambda: outbox.post(Answer("c", sent))))
    outbox.post(Answer("b", sent))
    loop.turn()
    assert sent == ["a", "b"]
    loop.turn()
    assert sent == ["a", "b", "c"]


def test_who_cannot_wait_has_all_of_them_leave_once() -> None:
    loop, sent = Loop(), list[str]()
    outbox = Outbox(lambda flush: loop.callbacks.append(flush))
    outbox.post(Answer("a", sent))
    outbox.flush()
    assert sent == ["a"]
    loop.turn()
    assert sent == ["a"]


def test_what_the_socket_does_not_take_goes_out_by_the_greenlet_of_the_connection() -> None:
    """Also when the client says nothing more."""
    near, far = socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = bytes(range(250)) * 240

    def serve() -> None:
        doorbell = Doorbell(near)
        reader = Reader(near, Settings(), 75.0, doorbell)
        read = HeadReader(Config()).read(b"GET / HTTP/1.1\r\n\r\n", {}, False)
        assert read is not None
        worker = SimpleNamespace(alive=True, outbox=Outbox(gevent.get_hub().loop.run_callback))
        answer = RealAnswer(read[0], near, Config(), worker, reader, 5.0)
        answer.environ = read[1]
        answer.start_response("200 OK", [("Content-Length", str(len(body)))])
        answer.write(body)
        with contextlib.suppress(ClientGone):
            doorbell.wait(5.0)
        doorbell.close()

    with near, far, gevent.Timeout(5):
        serving = gevent.spawn(serve)
        got = b""
        while not got.endswith(body):
            got += far.recv(1000)
        far.shutdown(socket.SHUT_WR)
        serving.get()
    gevent.get_hub().destroy(destroy_loop=True)  # it has descriptors
    assert got.startswith(b"HTTP/1.1 200 OK\r\n")

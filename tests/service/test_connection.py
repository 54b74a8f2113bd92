"""How long a client may take: to read its answer, with both ends in this process, and to shake hands over TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gunicorn.config import Config
from gunicorn.http.parser import RequestParser

from service.answer import Answer
from service.config import Settings
from service.connection import ClientGone, Reader
from tests.service.serving import body_of, gunicorn

SEND_TIMEOUT_S = 0.4
TLS = str(Path(__file__).parent / "tls.pem")  # a key and its certificate, made for these tests


class Worker:
    alive = True


@contextlib.contextmanager
def asked() -> Iterator[tuple[Answer, socket.socket]]:
    """A client that has sent a request, and the beginning of its answer; little fits in between."""
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        far.settimeout(20)
        far.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        cfg = Config()
        parser = RequestParser(cfg, near, ("127.0.0.1", 1))
        parser.unreader = reader = Reader(near, Settings(), 75)
        answer = Answer(next(parser), near, cfg, Worker(), reader, SEND_TIMEOUT_S)
        answer.environ = {}
        answer.start_response("200 OK", [])
        yield answer, far


def read(client: socket.socket, size: int, pause: float) -> threading.Thread:
    """A client that reads so much at a time, to the end."""

    def run() -> None:
        while client.recv(size):
            time.sleep(pause)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_client_that_reads_too_slowly_on_the_whole_is_given_up_though_it_never_stops() -> None:
    with asked() as (answer, client):
        reading = read(client, 1000, 0.02)  # 50 kB a second
        started = time.monotonic()
        with pytest.raises(ClientGone):
            answer.write(b"x" * 5_000_000)
        assert SEND_TIMEOUT_S * 0.9 < time.monotonic() - started < 20
        answer.sock.shutdown(socket.SHUT_WR)
        reading.join()


def test_a_client_that_reads_at_a_fair_rate_gets_its_answer_however_long_that_takes() -> None:
    with asked() as (answer, client):
        reading = read(client, 4000, 0.02)  # 200 kB a second
        started = time.monotonic()
        answer.write(b"x" * 300_000)
        answer.close()
        assert time.monotonic() - started > SEND_TIMEOUT_S
        answer.sock.shutdown(socket.SHUT_WR)
        reading.join()


def test_what_the_application_takes_is_not_the_clients_time() -> None:
    with asked() as (answer, client):
        reading = read(client, 65536, 0)
        for _ in range(8):
            time.sleep(0.1)
            answer.write(b"piece")
        answer.close()
        answer.sock.shutdown(socket.SHUT_WR)
        reading.join()


def test_a_tls_handshake_that_does_not_end_is_given_up_however_it_trickles() -> None:
    with (
        gunicorn(
            "tests.service.apps:server", "--certfile", TLS, "--keyfile", TLS, env={"HEADRACE_HEADER_TIMEOUT": "1"}
        ) as served,
        served.connect() as silent,
        served.connect() as trickling,
    ):
        started = time.monotonic()
        trickling.send(b"\x16\x03\x01\x02\x00")
        trickling.socket.settimeout(0.1)
        while time.monotonic() - started < 10:
            try:
                assert trickling.rest() == b""
                break
            except TimeoutError:
                trickling.send(b"\x01")
            except ConnectionError:
                break
        assert silent.rest() == b""
        assert 0.5 < time.monotonic() - started < 5
        context = ssl.create_default_context(cafile=TLS)
        with context.wrap_socket(served.connect().socket, server_hostname="localhost") as client:
            client.sendall(b"GET /large?n=3 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        assert body_of(answer) == b"xxx"
        assert "Traceback" not in served.log()

"""The lean way, end to end: bodies straight into memory, views straight out of it, one send, turns for everybody."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import selectors
import signal
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gunicorn.http.body import LengthReader

from service.config import Settings
from service.connection import Input, Reader
from tests.service.lean_apps import LARGE, PATTERN, VIEWS
from tests.service.serving import Client, Served, body_of, gunicorn, until
from workers.arena import reserve

APP = "tests.service.lean_apps:application"
SHORT = {"HEADRACE_BODY_TIMEOUT": "0.5", "HEADRACE_HEADER_TIMEOUT": "0.5"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gunicorn(APP) as served:
        yield served


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    with gunicorn(APP, "--keep-alive", "1", env=SHORT) as served:
        yield served


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


def post(path: str, body: bytes, length: int | None = None) -> bytes:
    return get(path, f"Content-Length: {len(body) if length is None else length}", method="POST") + body


def chunked(path: str, body: bytes) -> bytes:
    return get(path, "Transfer-Encoding: chunked", method="POST") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def dechunked(data: bytes) -> bytes:
    """A body in chunks, to its end and no further."""
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        piece, end, data = data[: int(size, 16)], data[int(size, 16) :][:2], data[int(size, 16) + 2 :]
        assert end == b"\r\n"
        if not piece:
            assert data == b""
            return body
        body += piece


# Bodies into memory: `Input` by itself


class Noting(socket.socket):
    """Notes where in memory it has received to."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.addresses: list[int] = []

    def recv_into(self, buffer: memoryview, *arguments: int) -> int:  # type: ignore[override]
        self.addresses.append(address(buffer))
        return super().recv_into(buffer, *arguments)

    def recv(self, *arguments: int) -> bytes:
        self.addresses.append(0)
        return super().recv(*arguments)


def address(buffer: memoryview) -> int:
    where: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return where


@contextlib.contextmanager
def a_body(length: int, patience: float = 30.0) -> Iterator[tuple[Input, Reader, Noting, socket.socket]]:
    """A body of that length of which nothing has come, and the socket that it will come from."""
    near, far = socket.socketpair()
    with Noting(near.detach()) as sock, far:
        reader = Reader(sock, Settings(body_timeout=patience), 75)
        reader.begin_body(expects_continue=False)
        yield Input(LengthReader(reader, length)), reader, sock, far


@contextlib.contextmanager
def a_slot(size: int) -> Iterator[memoryview]:
    """Shared memory as a client of the pool leases it."""
    fd = reserve("test", size)
    with mmap.mmap(fd, size) as memory, memoryview(memory) as view:
        os.close(fd)
        yield view


def test_a_body_goes_from_the_socket_into_a_slot_without_a_copy_in_between() -> None:
    with a_slot(1 << 20) as slot, a_body(60_000) as (body, _, sock, client):
        done, expected = 4096, []
        for piece in (PATTERN[:20_000], PATTERN[20_000:20_001], PATTERN[20_001:60_000]):
            client.sendall(piece)
            while piece:
                with slot[done:] as free:
                    expected.append(address(free))
                    got = body.readinto(free)
                assert got
                done, piece = done + got, piece[got:]
        assert sock.addresses == expected
        assert (bytes(slot[4096:done]), body.readinto(slot)) == (PATTERN[:60_000], 0)
        assert len(sock.addresses) == len(expected)


def test_a_read_into_memory_takes_what_is_there_and_leaves_the_rest() -> None:
    with a_body(10) as (body, _, _, client):
        target = bytearray(8)
        client.sendall(b"abc")
        assert (body.readinto(target), target) == (3, b"abc" + bytes(5))
        client.sendall(b"defghij")
        assert (body.readinto(memoryview(target)[:2]), target[:2]) == (2, b"de")
        assert (body.readinto(bytearray()), body.readinto(target)) == (0, 5)
        assert (target[:5], body.readinto(target), body.read()) == (b"fghij", 0, b"")


def test_memory_of_any_format_is_read_into_as_bytes() -> None:
    with a_body(16) as (body, _, _, client):
        floats = np.zeros((2, 2), np.float32)
        client.sendall(np.arange(4, dtype=np.float32).tobytes())
        assert (body.readinto(floats), floats.tolist()) == (16, [[0, 1], [2, 3]])


def test_reads_of_all_kinds_follow_each_other() -> None:
    with a_body(22) as (body, _, _, client):
        target = bytearray(100)
        client.sendall(b"line one\nline two\nabcd")
        assert body.readinto(memoryview(target)[:2]) == 2
        assert body.readline() == b"ne one\n"
        assert body.read(3) == b"lin"
        assert (body.readinto(memoryview(target)[:4]), target[:4]) == (4, b"e tw")
        assert body.readline() == b"o\n"
        assert (body.readinto(target), target[:4]) == (4, b"abcd")
        assert body.readinto(target) == 0


def test_a_read_into_memory_does_not_wait_for_more_than_a_line_has_left() -> None:
    with a_body(5000, patience=0.2) as (body, _, _, client):
        client.sendall(b"line\n" + bytes(1019))  # what gunicorn reads at once to look for the end of a line
        assert body.readline() == b"line\n"
        target = bytearray(3000)
        assert body.readinto(target) == 1019
        with pytest.raises(TimeoutError):
            body.readinto(target)
        assert body.failed


@pytest.mark.parametrize("first", ["readinto", "read", "readline"])
def test_no_byte_of_a_next_request_is_taken_for_the_body(first: str) -> None:
    with a_body(8) as (body, reader, _, client):
        client.sendall(b"12\n45678GET /next")
        target, got = bytearray(100), b""
        if first != "readinto":
            got = getattr(body, first)(3)
        while size := body.readinto(target):
            got += target[:size]
        assert got == b"12\n45678"
        client.shutdown(socket.SHUT_WR)
        assert reader.take_buffered() + reader.sock.recv(100) == b"GET /next"


def test_a_client_that_leaves_within_the_body_is_its_end() -> None:
    with a_body(10) as (body, reader, _, client):
        target = bytearray(10)
        client.sendall(b"123")
        client.shutdown(socket.SHUT_WR)
        assert [body.readinto(target), body.readinto(target), body.readinto(target)] == [3, 0, 0]
        assert reader.failure is None


def test_a_reset_within_the_body_is_an_oserror() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    with near:
        reader = Reader(near, Settings(), 75)
        reader.begin_body(expects_continue=False)
        body = Input(LengthReader(reader, 10))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(ConnectionResetError) as raised:
            body.readinto(bytearray(10))
        assert (body.failed, reader.failure) == (True, raised.value)


# … and under gunicorn


def steps(served: Served, how: str, body: bytes, late: bool) -> object:
    request = post(f"/steps?steps={how}", body)
    with served.connect() as client:
        if late:
            client.send(request[: -len(body)])
            until_taken(client.socket)
            client.send(body)
        else:
            client.send(request)
        status, _, told = client.response()
        assert (status, client.get("/light")[2]) == (200, b'{"hello":"world"}')
        return json.loads(told)


def until_taken(sock: socket.socket) -> None:
    """Until the other side's kernel has all that was sent."""
    until(lambda: fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)) == bytes(4), "all that was sent has arrived")


BODY = b"line one\nline two\nand the rest of it"


@pytest.mark.parametrize("late", [False, True], ids=["with the head", "later"])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("into100+into100", [BODY.decode(), ""]),
        ("into4+into5+read0+into100", ["line", " one\n", "", "line two\nand the rest of it"]),
        ("line+into4+line+read3+into100+read100", ["line one\n", "line", " two\n", "and", " the rest of it", ""]),
        ("read5+line+into100", ["line ", "one\n", "line two\nand the rest of it"]),
        ("into0+read100+into1", ["", BODY.decode(), ""]),
    ],
)
def test_both_kinds_of_input_can_be_read_into_memory(served: Served, how: str, expected: list[str], late: bool) -> None:
    assert steps(served, how, BODY, late) == expected


def test_a_large_body_goes_through_shared_memory_and_back(served: Served) -> None:
    with served.connect() as client:
        client.send(post("/slot", PATTERN))
        status, _, body = client.response()
        assert (status, len(body), body == PATTERN) == (200, LARGE, True)
        client.send(post("/slot", b"small"))
        assert client.response()[::2] == (200, b"small")


def test_what_follows_a_body_that_was_read_into_memory_is_the_next_request(served: Served) -> None:
    with served.connect() as client:
        large = PATTERN[:300_000]
        client.send(post("/slot", large) + get("/light") + post("/steps?steps=into3", b"abc") + post("/slot", large))
        assert client.response()[2] == large
        assert client.response()[2] == b'{"hello":"world"}'
        assert client.response()[2] == b'["abc"]'
        assert client.response()[2] == large


def test_a_body_that_ends_too_soon_or_comes_too_slowly_is_told_to_who_reads_into_memory(impatient: Served) -> None:
    with impatient.connect() as client:
        client.send(post("/steps?steps=into100+into100+into100", b"abc", length=10))
        client.socket.shutdown(socket.SHUT_WR)
        assert json.loads(body_of(client.rest())) in (["abc", "", ""], ["", "", ""])
    with impatient.connect() as client:
        started = time.monotonic()
        client.send(post("/steps?steps=into100+into100+into100", b"abc", length=10))
        answer = client.rest()
        assert 0.4 < time.monotonic() - started < 5
        assert b"\r\nConnection: close\r\n" in answer
        assert json.loads(body_of(answer)) == ["abc", "TimeoutError"]


# Views


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_a_plain_application_arrive_byte_for_byte(served: Served, kind: str) -> None:
    expected = b"".join(view.tobytes() for view in VIEWS[kind])
    path = f"/views?kind={kind.replace(' ', '+')}"
    with served.connect() as client:
        client.send(get(path + "&length=1") + get("/light"))
        assert client.response()[2] == expected
        assert client.response()[2] == b'{"hello":"world"}'
    head, _, body = served.exchange(get(path, "Connection: close")).partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked" in head
    assert dechunked(body) == expected
    assert body_of(served.exchange(get(path).replace(b"HTTP/1.1", b"HTTP/1.0"))) == expected
    answer = served.exchange(get(path + "&length=1", "Connection: close", method="HEAD"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"Content-Length: %d" % len(expected) in head, body) == (True, b"")


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_a_light_handler_arrive_byte_for_byte(served: Served, kind: str) -> None:
    expected = b"".join(view.tobytes() for view in VIEWS[kind])
    name = kind.replace(" ", "+")
    assert dechunked(body_of(served.exchange(get(f"/light/views?kind={name}", "Connection: close")))) == expected
    if len(VIEWS[kind]) > 1:
        return
    with served.connect() as client:
        client.send(get(f"/light/view?kind={name}") + get("/light"))
        status, headers, body = client.response()
        assert (status, headers["content-length"], body == expected) == (200, str(len(expected)), True)
        assert client.response()[2] == b'{"hello":"world"}'
        client.send(get(f"/light/view?kind={name}", "Connection: close", method="HEAD"))
        assert body_of(client.rest()) == b""


# One send


def segments_with_data(sock: socket.socket) -> int:
    """How many have come: `tcpi_data_segs_in`. Each send is one, if it is small."""
    return int(struct.unpack_from("I", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 152)[0])


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/light"),
        get("/light/view?kind=small"),
        post("/light/echo", b"x" * 1000),
        get("/views?kind=small&length=1"),
        get("/nope"),
        post("/way", b"chunked").replace(b"Content-Length: 7", b"X-A: 1\r\nExpect: 100-continue\r\nContent-Length: 7"),
    ],
    ids=["light", "light view", "echo", "plain view", "by Flask", "by gunicorn's parser"],
)
def test_head_and_body_of_an_answer_leave_in_one_send(served: Served, request_bytes: bytes) -> None:
    with served.connect() as client:
        before = segments_with_data(client.socket)
        for _ in range(200):
            client.send(request_bytes)
            head, _, body = client.socket.recv(65536).partition(b"\r\n\r\n")
            assert b"Content-Length: %d" % len(body) in head
        assert segments_with_data(client.socket) - before == 200


# Both ways on one connection

KINDS: dict[str, Callable[[bytes], bytes]] = {
    "lean": lambda body: post("/way", body),
    "chunked": lambda body: chunked("/way", body),
    "expect": lambda body: get("/way", "Expect: 100-continue", f"Content-Length: {len(body)}", method="POST") + body,
}


def test_pipelined_requests_of_both_ways_are_answered_in_order(served: Served) -> None:
    for kinds in itertools.product(KINDS, repeat=3):
        bodies = [f"{number} {kind}" for number, kind in enumerate(kinds)]
        with served.connect() as client:
            client.send(b"".join(KINDS[kind](body.encode()) for kind, body in zip(kinds, bodies, strict=True)))
            for kind, body in zip(kinds, bodies, strict=True):
                status, _, told = client.response()
                assert (status, json.loads(told)) == (200, ["lean" if kind == "lean" else "gunicorn", body]), kinds
            client.send(get("/way"))
            assert json.loads(client.response()[2]) == ["lean", ""]


@pytest.mark.parametrize("kind", ["chunked", "expect"])
def test_after_a_request_that_is_not_plain_the_next_plain_one_is_taken_lean(served: Served, kind: str) -> None:
    with served.connect() as client:
        for _ in range(3):
            for one, told in ((kind, "gunicorn"), ("lean", "lean"), ("lean", "lean")):
                client.send(KINDS[one](b"body"))
                assert json.loads(client.response()[2]) == [told, "body"]


# What stands between


@pytest.mark.parametrize("apart", [False, True])
def test_the_body_that_a_middleware_puts_in_place_is_the_body(served: Served, apart: bool) -> None:
    for path, told in (("/upper", b"BODY"), ("/longer", b"bo"), ("/light/echo", b"body")):
        request = post(path, b"body")
        with served.connect() as client:
            client.send(request[:-4] if apart else request)
            if apart:
                until(lambda: unread_by_the_server(client.socket) == 0, "the head has been read")
                client.send(request[-4:])
            assert client.response()[2] == told


def unread_by_the_server(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])


def test_no_view_goes_through_a_middleware(served: Served) -> None:
    with served.connect() as client:
        assert client.get("/shouting?kind=small")[::2] == (200, b"0123456789")


def test_an_error_log_that_is_opened_anew_is_what_applications_write_to(tmp_path: Path) -> None:
    file, moved = tmp_path / "errors", tmp_path / "moved"
    with gunicorn(APP, "--error-logfile", str(file)) as served, served.connect() as client:
        assert client.get("/errors?line=before")[0] == 200
        file.rename(moved)
        served.signal(signal.SIGUSR1)

        def is_reopened() -> bool:
            assert client.get("/errors?line=after")[0] == 200
            return file.exists() and "after" in file.read_text()

        until(is_reopened, "a line in the new file")
        assert "before" in moved.read_text()


# Clients that do not read


def test_early_hints_have_a_deadline_too() -> None:
    with gunicorn(APP, env={"HEADRACE_SEND_TIMEOUT": "0.5"}) as served, served.connect() as client:
        client.send(get("/hints"))
        until(lambda: "hints: ClientGone" in served.log(), "the client is given up")


def test_nothing_follows_what_could_not_be_sent() -> None:
    with gunicorn(APP, env={"HEADRACE_SEND_TIMEOUT": "0.5"}) as served, served.connect() as client:
        client.send(get("/stubborn") + get("/light"))
        until(lambda: "stubborn: 4 failed" in served.log(), "every piece is refused")
        rest = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.socket.recv(1 << 20):
                rest += piece
        assert rest.startswith(b"HTTP/1.1 200 ") and b"tail" not in rest and b"hello" not in rest


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
def test_answers_that_a_client_lets_wait_all_arrive_in_order(served: Served, apart: bool) -> None:
    """Far more than the system holds for it, so most wait in the server."""
    names = [f"{n:04}" + "x" * 2000 for n in range(6000)]
    with served.connect() as client:

        def ask() -> None:
            for start in range(0, len(names), 1 if apart else 50):
                client.send(
                    b"".join([get(f"/light?name={name}") for name in names[start : start + (1 if apart else 50)]])
                )

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: not can_send(client.socket), "the server has stopped reading")
        answers = [client.response()[2] for _ in names]
        asking.join()
    assert answers == [json.dumps({"hello": name}, separators=(",", ":")).encode() for name in names]


FOLLOWING = {
    "a malformed request": (b"BAD \x01 x\r\n\r\n", False),
    "half a head": (b"GET /x HTT", False),
    "half a head and an end": (b"GET /x HTT", True),
    "a body that does not come": (post("/light/echo", b"", 5), False),
    "a body that is held back": (get("/light/echo", "Content-Length: 5", "Expect: 100-continue", method="POST"), False),
    "an end": (b"", True),
}


@pytest.mark.parametrize("what", FOLLOWING)
def test_nothing_comes_into_the_middle_of_an_answer_that_has_to_wait(impatient: Served, what: str) -> None:
    following, ends = FOLLOWING[what]
    most = answers_until_full(impatient)
    for count in (most - 1, most, most + 1):  # the last of them is the one that the socket takes in part
        with patient_reader(impatient) as client:
            before = impatient.log().count("GET /light/big -> 200")
            client.send(get("/light/big") * count + following)
            if ends:
                client.socket.shutdown(socket.SHUT_WR)
            settled(lambda before=before: impatient.log().count("GET /light/big -> 200") - before)
            got = client.rest()
        for number in range(count):
            head, _, got = got.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), (what, number, head[:100])
            assert got[:60_000] == PATTERN[:60_000], (what, number)
            got = got[60_000:]
        assert got == b"" or got.startswith(b"HTTP/1.1 "), (what, got[:100])


def patient_reader(served: Served) -> Client:
    """It reads late, and the system holds little for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20)
    sock.connect(("127.0.0.1", served.port))
    return Client(sock)


def answers_until_full(served: Served) -> int:
    """How many answers to a client that does not read are made before the next one has to wait."""
    before = served.log().count("GET /light/big -> 200")
    with patient_reader(served) as client:
        client.send(get("/light/big") * 200)
        return settled(lambda: served.log().count("GET /light/big -> 200") - before)


def settled(count: Callable[[], int]) -> int:
    """What it is once it has not changed for a moment."""
    last, since = -1, time.monotonic()

    def rests() -> bool:
        nonlocal last, since
        if (now := count()) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 0.2

    until(rests, "it rests")
    return last


def can_send(sock: socket.socket) -> bool:
    """Not once the other end has been full for a moment."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_WRITE)
        return bool(selector.select(0.2))


# Turns


@pytest.mark.parametrize("kind", ["a head alone", "a body that comes apart"])
def test_connections_that_never_pause_all_get_their_turn(served: Served, kind: str) -> None:
    count, each, wanted = 8, 4000, 8000  # many to one read of small answers
    request, mark = get("/light"), b'{"hello"'
    if kind != "a head alone":
        each, wanted = 600, 1200
        head = post("/light/echo", b"", 8000)
        request, mark = head + b'{"hello"' + b"x" * (8192 - len(head) - 8), b'{"hello"'
        request = request.replace(b"Content-Length: 8000", b"Content-Length: %d" % (8192 - len(head)))
    senders: list[threading.Thread] = []
    with contextlib.ExitStack() as ends, selectors.DefaultSelector() as selector:
        clients = [ends.enter_context(served.connect()) for _ in range(count)]
        for client in clients:
            assert client.get("/light")[0] == 200
            selector.register(client.socket, selectors.EVENT_READ, client)
        for client in clients:
            senders.append(threading.Thread(target=keeps_sending, args=(client.socket, request * each)))
            senders[-1].start()
        answered = dict.fromkeys(clients, 0)
        begun = False
        while (total := sum(answered.values())) < wanted:
            for key, _ in selector.select(10):
                answered[key.data] += key.data.socket.recv(16384).count(mark)
            if not begun and all(answered.values()):
                answered, begun = dict.fromkeys(clients, 0), True  # by now every one of them is sending
        assert min(answered.values()) >= total / count / 4, sorted(answered.values())
        for client, sender in zip(clients, senders, strict=True):
            client.socket.shutdown(socket.SHUT_RDWR)
            sender.join()


def keeps_sending(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


# Nothing is left


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/light?name=x"),
        post("/light/echo", b"body"),
        get("/light/view?kind=small"),
        get("/light/stream"),
        get("/views?kind=slices"),
        get("/views?kind=small&length=1"),
        post("/steps?steps=line+into3", b"body"),
        get("/light", "Connection: close"),
        post("/light/echo", PATTERN[:40_000]),  # more than is read with a head
        post("/slot", PATTERN[:40_000]),
    ],
    ids=[
        "light", "echo", "light view", "stream", "plain views", "plain view", "readinto", "close",
        "echo of a large body", "a large body into memory",
    ],
)  # fmt: skip
def test_requests_leave_nothing_to_the_collector(served: Served, request_bytes: bytes) -> None:
    def ask(count: int) -> None:
        with contextlib.ExitStack() as ends:
            client = ends.enter_context(served.connect())
            for _ in range(count):
                client.send(request_bytes)
                data = b""
                while not whole(data):
                    piece = client.socket.recv(1 << 20)
                    assert piece
                    data += piece
                if b"Connection: close" in request_bytes:
                    client = ends.enter_context(served.connect())

    def settle() -> int:
        with served.connect() as client:
            found = json.loads(client.get("/settle")[2])
            assert isinstance(found, int)
            return found

    ask(5)
    settle()
    settle()
    ask(200)
    assert settle() < 100  # a cycle of each request would be 200 at the least


def whole(data: bytes) -> bool:
    """Whether all of an answer is there."""
    head, end, body = data.partition(b"\r\n\r\n")
    if b"Transfer-Encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    return bool(end) and len(body) == int(fields[b"Content-Length"])


# The silent


def test_a_connection_that_is_silent_after_an_answer_is_closed_when_its_keepalive_is_over(impatient: Served) -> None:
    with contextlib.ExitStack() as ends:
        clients = []
        for requests, count in ((get("/light"), 1), (get("/light") * 3, 3), (chunked("/way", b"x") + get("/light"), 2)):
            clients.append(client := ends.enter_context(impatient.connect()))
            client.send(requests)
            for _ in range(count):
                assert client.response()[0] == 200
        started = time.monotonic()
        for client in clients:
            assert client.rest() == b""
            assert 0.7 < time.monotonic() - started < 3


def test_a_connection_that_says_nothing_is_closed_when_a_head_would_be_too_slow(impatient: Served) -> None:
    started = time.monotonic()
    with impatient.connect() as client:
        assert client.rest() == b""
    assert 0.4 < time.monotonic() - started < 3


def test_a_head_that_stops_half_way_is_408(impatient: Served) -> None:
    half = b"GET /light HTTP/1.1\r\nHost"
    with contextlib.ExitStack() as ends:
        clients = []
        for before in (b"", get("/light"), chunked("/way", b"x")):
            for pipelined in (True, False):
                clients.append(client := ends.enter_context(impatient.connect()))
                client.send(before + half if pipelined else before)
                if before:
                    assert client.response()[0] == 200
                if not pipelined:
                    client.send(half)
        started = time.monotonic()
        for client in clients:
            assert client.rest().startswith(b"HTTP/1.1 408 ")
            assert 0.2 < time.monotonic() - started < 3


def test_a_connection_that_goes_on_within_its_keepalive_stays(impatient: Served) -> None:
    with impatient.connect() as client:
        started = time.monotonic()
        while time.monotonic() - started < 1.2:
            assert client.get("/light")[0] == 200
            with pytest.raises(TimeoutError):
                client.socket.settimeout(0.3)
                client.socket.recv(1)
            client.socket.settimeout(10)

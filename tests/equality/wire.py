"""One exchange with a server, bytes out and a `Record` back: what was answered, and how the connection ended.

An exchange is over when the server closes. After the answers an entry expects, a connection that has not been called
closed is asked for `/sentinel`: answered, it was open. Nothing waits for time to pass; a server that says nothing for
`PATIENCE_S` fails the test.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

PATIENCE_S = 10.0
SENTINEL = b"GET /sentinel HTTP/1.1\r\nHost: sentinel\r\n\r\n"

_STATUS_LINE = re.compile(
    rb"HTTP/(\d\.\d) (\d{3})(?: ([^\r\n]*))?"
)  # as gunicorn, which lets applications leave the last space out
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([^\r\n\0]*)")
_DATE = re.compile(rb"(\nDate: )[^\r]*")
_CHUNK_SIZE = re.compile(rb"[0-9A-F]{1,8}")
_SOCK_DIAG = 20
_ANY_STATE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Answer:
    """`framing` says what ends the body: `length`, `chunked`, the `end` of the connection, or that there is `none`."""

    version: str
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    framing: str
    cut: bool = False

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True, slots=True)
class Record:
    """`rest` is what came and is no answer; `end` is `open`, `closed` or `reset`."""

    answers: tuple[Answer, ...]
    rest: bytes
    end: str

    @property
    def statuses(self) -> list[int]:
        return [answer.status for answer in self.answers]


class Silence(AssertionError):
    """The server neither answers nor closes."""


def exchange(
    port: int,
    parts: Sequence[bytes],
    *,
    answers: int = 1,
    half_close: bool = False,
    bodiless: Collection[int] = (),
    split_at: int | None = None,
) -> Record:
    """Send `parts`, each after an answer to the one before, and read until it is known how the connection ended.

    `half_close`: the client says at once that it sends no more. `bodiless`: which answers are to HEAD.
    `split_at`: the first part goes in two sends that the server reads one by one.
    """
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(sock, bodiless)
        for number, part in enumerate(parts):
            if number:
                client.read_until(lambda number=number: len(client.answers) >= number)
            if split_at is not None and number == 0:
                client.send(part[:split_at])
                _wait_until_read(sock)
                part = part[split_at:]
            client.send(part)
        if half_close:
            client.no_more()
        else:
            client.read_until(lambda: client.finals() >= answers)
            if not client.ended and client.answers and client.answers[-1].header("connection") != "close":
                client.send(SENTINEL)
                client.no_more()
        client.read_until(lambda: False)
    return _record(client, port)


def reset(port: int, data: bytes) -> None:
    """Send `data` and be gone, as if the client's machine had died."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        sock.sendall(data)
        _wait_until_read(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Client:
    def __init__(self, sock: socket.socket, bodiless: Collection[int]) -> None:
        self.sock = sock
        self.data = bytearray()
        self.answers: list[Answer] = []
        self.rest = b""
        self.ended = ""
        self._bodiless = bodiless

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # whatever it has answered before can still be read
        except TimeoutError:
            raise Silence(f"the server does not read; it has said {bytes(self.data[:500])!r}") from None

    def no_more(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def finals(self) -> int:
        return sum(answer.status >= 200 for answer in self.answers)

    def read_until(self, condition: object) -> None:
        assert callable(condition)
        while not condition() and not self.ended:
            try:
                piece = self.sock.recv(1 << 20)
                self.ended = "" if piece else "closed"
            except ConnectionResetError:
                piece, self.ended = b"", "reset"
            except TimeoutError:
                raise Silence(f"the server has only said {bytes(self.data[:500])!r}") from None
            self.data += piece
            self.answers, self.rest = split(bytes(self.data), bool(self.ended), self._bodiless)


def _record(client: _Client, port: int) -> Record:
    """Without what differs from one run to the next."""
    answers = [_timeless(answer, port) for answer in client.answers]
    end = client.ended
    if answers and answers[-1].status == 200 and answers[-1].body == b"sentinel" and not client.rest:
        answers.pop()
        end = "open"
    return Record(tuple(answers), _DATE.sub(rb"\1*", client.rest), end)


def _timeless(answer: Answer, port: int) -> Answer:
    headers = []
    for name, value in answer.headers:
        if name == "Date" or (name == "X-Request-ID" and re.fullmatch("[0-9a-f]{16}", value)):
            value = "*"
        headers.append((name, value.replace(f"127.0.0.1:{port}", "127.0.0.1:*")))
    body = answer.body.replace(b'"SERVER_PORT": "%d"' % port, b'"SERVER_PORT": "*"')  # all have five digits
    return replace(answer, headers=tuple(headers), body=body)


# What a server has said, as answers


def split(data: bytes, ended: bool, bodiless: Collection[int] = ()) -> tuple[list[Answer], bytes]:
    """The answers in `data` and what follows them. Strict: from the first byte that HTTP does not allow, all is rest.

    Whether an answer is to HEAD only its request knows. Where that is not told by `bodiless`, a body that is not
    there, with the next answer or the end in its place, was none.
    """
    answers: list[Answer] = []
    finals = 0
    while data:
        found = _one(data, ended, finals in bodiless)
        if found is None:
            break
        answer, data = found
        answers.append(answer)
        finals += answer.status >= 200
    return answers, data


def _one(data: bytes, ended: bool, bodiless: bool) -> tuple[Answer, bytes] | None:
    head, blank, rest = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(lines[0])
    matches = [_HEADER.fullmatch(line) for line in lines[1:]]
    if not blank or status_line is None or None in matches:
        return None
    headers = tuple((m[1].decode("latin-1"), m[2].decode("latin-1")) for m in matches if m)
    version, status, reason = status_line[1].decode(), int(status_line[2]), (status_line[3] or b"").decode("latin-1")
    answer = Answer(version, status, reason, headers, b"", "none")
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    codings = [value for name, value in headers if name.lower() == "transfer-encoding"]
    if status < 200 or status in (204, 304) or bodiless:
        return answer, rest
    if codings:
        return _chunked(answer, rest, ended) if codings == ["chunked"] and not lengths else None
    if lengths:
        return _counted(answer, rest, ended, lengths)
    if answer.header("connection") == "close":
        return (replace(answer, body=rest, framing="end"), b"") if ended else None
    return answer, rest


def _counted(answer: Answer, rest: bytes, ended: bool, lengths: list[str]) -> tuple[Answer, bytes] | None:
    if len(set(lengths)) > 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
        return None
    length = int(lengths[0])
    if length and ended and (not rest or rest.startswith(b"HTTP/1.")):
        return answer, rest
    if len(rest) < length and not ended:
        return None
    return replace(answer, body=rest[:length], framing="length", cut=len(rest) < length), rest[length:]


def _chunked(answer: Answer, rest: bytes, ended: bool) -> tuple[Answer, bytes] | None:
    body = b""
    while True:
        size, end, following = rest.partition(b"\r\n")
        if not end:
            break
        if not _CHUNK_SIZE.fullmatch(size):
            return None
        length = int(size, 16)
        chunk, mark = following[:length], following[length : length + 2]
        if mark and mark != b"\r\n"[: len(mark)]:
            return None
        if len(mark) < 2:
            body += chunk
            break
        rest = following[length + 2 :]
        body += chunk
        if not length:
            return replace(answer, body=body, framing="chunked"), rest
    return (replace(answer, body=body, framing="chunked", cut=True), b"") if ended else None


# Whether the server has read what it was sent


def _wait_until_read(sock: socket.socket) -> None:
    """Wait until nothing is left in the queue of the server's end of this connection (sock_diag(7)): its process
    has read all. That the bytes have arrived there, which is what SIOCOUTQ tells, would not be enough."""
    deadline = time.monotonic() + PATIENCE_S
    while _unread_by_peer(sock):
        if time.monotonic() > deadline:
            raise Silence("the server does not read")


def _unread_by_peer(sock: socket.socket) -> int:
    address = socket.inet_aton("127.0.0.1").ljust(16, b"\0")
    ports = struct.pack("!HH", sock.getpeername()[1], sock.getsockname()[1])
    one_socket = ports + address + address + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + one_socket
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as diag:
        diag.send(struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG, 1, 0, 0) + request)
        reply = diag.recv(8192)
    (kind,) = struct.unpack_from("=H", reply, 4)
    if kind != _SOCK_DIAG:
        return 0  # the server has closed
    (unread,) = struct.unpack_from("=I", reply, 16 + 4 + 48 + 4)
    return int(unread)

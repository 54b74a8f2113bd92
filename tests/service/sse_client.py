"""A client of streams that can tell each byte's coming, and every way a stream can end."""

from __future__ import annotations

import socket
import struct

from tests.service.serving import PATIENCE_S


class StreamClient:
    """One stream on a connection of its own. `body` is what has come of it, without the chunks' framing; `whole` tells
    that its end has come, `closed` that the connection has."""

    def __init__(
        self,
        to: int | socket.socket,
        path: str,
        *headers: str,
        version: str = "HTTP/1.1",
        method: str = "GET",
        body: bytes = b"",
        window: int = 0,
    ) -> None:
        """`to`: a port of 127.0.0.1, or what is connected already. `window`: bytes of a receive buffer as small as it
        gets."""
        if isinstance(to, int):
            self.socket = socket.socket()
            if window:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            self.socket.settimeout(PATIENCE_S)
            self.socket.connect(("127.0.0.1", to))
        else:
            self.socket = to
        self.socket.sendall("\r\n".join([f"{method} {path} {version}", "Host: a", *headers, "", ""]).encode() + body)
        self.head = b""
        self.body = b""
        self.chunks = 0
        self.whole = False
        self.closed = False
        self._unread = b""

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @property
    def status(self) -> int:
        self._read_head()
        return int(self.head.split()[1])

    @property
    def headers(self) -> dict[str, str]:
        self._read_head()
        lines = self.head.decode().split("\r\n")[1:]
        return dict(line.lower().split(": ", 1) for line in lines)

    def until(self, text: bytes) -> bytes:
        """The body so far, once `text` has come."""
        while text not in self.body:
            assert not (self.whole or self.closed), (text[:200], self.body[-200:])
            self._receive()
        return self.body

    def finish(self) -> bytes:
        """The body, once its end or the end of the connection has come."""
        while not (self.whole or self.closed):
            self._receive()
        return self.body

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _read_head(self) -> None:
        while not self.head and not self.closed:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self.socket.recv(65536)
        except ConnectionResetError:
            data = b""
        self.closed = not data
        self._unread += data
        if not self.head:
            head, blank, rest = self._unread.partition(b"\r\n\r\n")
            if not blank:
                return
            self.head, self._unread = head, rest
        length = self.headers.get("content-length")
        if length is not None:
            self.body, self.whole = self._unread, len(self._unread) >= int(length)
        elif "transfer-encoding" in self.headers:
            self._take_chunks()
        else:
            self.body = self._unread
            self.whole = self.closed

    def _take_chunks(self) -> None:
        while True:
            size, end, rest = self._unread.partition(b"\r\n")
            if not end:
                return
            length = int(size, 16)
            if len(rest) < length + 2:
                return
            assert rest[length : length + 2] == b"\r\n"
            self.body += rest[:length]
            self._unread = rest[length + 2 :]
            if not length:
                self.whole = True
                assert self._unread == b""
                return
            self.chunks += 1

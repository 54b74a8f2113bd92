"""Clients of server-sent events, as many as are asked for, in one process that does little else.

    python -m tests.bench.listeners PORT PATH STREAMS EVENTS
    python -m tests.bench.listeners PORT PATH STREAMS - SECONDS
    python -m tests.bench.listeners PORT PATH RATE leave SECONDS

The first form prints one line, a `Heard` as JSON: all connect, then all ask at once, then each is read to its end. The
second one listens until its standard input ends, or so long at most; it says "listening" once all have had an event.
The third one has so many clients come a second, and each of them leave at some moment of the next one; it prints how
many there were.
"""

from __future__ import annotations

import heapq
import json
import random
import select
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Heard:
    """`complete`: streams with all their events and a proper end. `wall_s`: from the first request to the last end.
    Gaps are between two events of one stream, `first_ms` is how long the first event took, median."""

    streams: int
    complete: int
    wall_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    first_ms: float


class Listener:
    __slots__ = ("asked", "events", "fd", "heard", "last", "ok", "socket", "tail")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fd = self.socket.fileno()
        self.events = 0
        self.last = self.asked = 0.0
        self.heard = self.ok = False
        self.tail = b""


def listen(port: int, path: str, streams: int, events: int) -> Heard:
    listeners = {listener.fd: listener for listener in (Listener(port) for _ in range(streams))}
    poll = select.epoll()
    request = f"GET {path} HTTP/1.1\r\nHost: a\r\nAccept: text/event-stream\r\n\r\n".encode()
    for listener in listeners.values():
        poll.register(listener.fd, select.EPOLLIN)
        listener.socket.setblocking(False)
    begun = time.perf_counter()
    for listener in listeners.values():
        listener.asked = time.perf_counter()
        listener.socket.send(request)
    gaps: list[float] = []
    firsts: list[float] = []
    complete, left, now = 0, streams, begun
    deadline = begun + PATIENCE_S
    while left and now < deadline:
        for fd, _ in poll.poll(1.0, 1024):
            listener = listeners[fd]
            try:
                data = listener.socket.recv(65536)
            except OSError:
                data = b""
            now = time.perf_counter()
            new = data.count(b"\ndata: ")
            if not listener.heard:
                listener.heard = True
                listener.ok = data.startswith(b"HTTP/1.1 200 ")
            if new:
                if listener.events:
                    gaps.append(now - listener.last)
                    gaps += [0.0] * (new - 1)
                else:
                    firsts.append(now - listener.asked)
                listener.last = now
                listener.events += new
            if not data or (listener.tail + data[-8:]).endswith(b"\r\n0\r\n\r\n"):
                left -= 1
                complete += listener.ok and bool(data) and listener.events == events
                poll.unregister(fd)
                listener.socket.close()
            else:
                listener.tail = data[-8:]
        now = time.perf_counter()
    gaps.sort()
    firsts.sort()
    return Heard(
        streams,
        complete,
        round(now - begun, 4),
        round(1000 * gaps[len(gaps) // 2], 3) if gaps else 0.0,
        round(1000 * gaps[len(gaps) * 99 // 100], 3) if gaps else 0.0,
        round(1000 * firsts[len(firsts) // 2], 3) if firsts else 0.0,
    )


def hold(port: int, path: str, streams: int, seconds: float) -> None:
    """Keep so many streams open, and read what they say."""
    listeners = {}
    poll = select.epoll()
    request = f"GET {path} HTTP/1.1\r\nHost: a\r\nAccept: text/event-stream\r\n\r\n".encode()
    for _ in range(streams):
        listener = Listener(port)
        listener.socket.sendall(request)
        listener.socket.setblocking(False)
        listeners[listener.fd] = listener
        poll.register(listener.fd, select.EPOLLIN)
    poll.register(0, select.EPOLLIN)
    deadline = time.monotonic() + seconds
    silent, told = streams, False
    while time.monotonic() < deadline:
        for fd, _ in poll.poll(1.0, 1024):
            if fd == 0:
                return
            listener = listeners[fd]
            data = listener.socket.recv(65536)
            if not data:
                sys.exit("a stream has ended")
            if not listener.events and b"\ndata: " in data:
                listener.events = 1
                silent -= 1
        if not silent and not told:
            told = True
            print("listening", flush=True)


def leave(port: int, path: str, rate: int, seconds: float) -> int:
    """Half of them close, half reset."""
    request = f"GET {path} HTTP/1.1\r\nHost: a\r\nAccept: text/event-stream\r\n\r\n".encode()
    chance = random.Random(rate)
    staying: list[tuple[float, int, socket.socket]] = []
    begun = time.monotonic()
    came = 0
    while (now := time.monotonic()) < begun + seconds:
        while came < rate * (now - begun):
            client = socket.create_connection(("127.0.0.1", port), 30)
            if chance.random() < 0.5:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(request[: chance.randrange(len(request))] if chance.random() < 0.1 else request)
            came += 1
            heapq.heappush(staying, (now + chance.random(), came, client))
        while staying and staying[0][0] <= now:
            heapq.heappop(staying)[2].close()
        time.sleep(0.001)
    for _, _, client in staying:
        client.close()
    return came


def main() -> None:
    port, path, streams = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if sys.argv[4] == "leave":
        print(leave(port, path, streams, float(sys.argv[5])))
    elif sys.argv[4] == "-":
        hold(port, path, streams, float(sys.argv[5]))
    else:
        print(json.dumps(asdict(listen(port, path, streams, int(sys.argv[4])))))


if __name__ == "__main__":
    main()

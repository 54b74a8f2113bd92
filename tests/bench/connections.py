"""A client whose connections are told apart: each sends its next request when it has the answer to the last.

    python -m tests.bench.connections PORT PATH CONNECTIONS SECONDS

It is a process of its own and prints one line, a `FairRun` of `tests.bench.load` as JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import sys
import time
from statistics import median

from tests.bench.servers import BODY

WARM_UP_S = 0.3
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection:
    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.taken: list[float] = []
        self.errors = 0
        self._request = request
        self._unread = b""
        self._sent = 0.0

    def send(self) -> None:
        self._sent = time.perf_counter()
        with contextlib.suppress(OSError):  # the next `receive` finds out
            self.socket.sendall(self._request)

    def receive(self) -> bool:
        """Take what has come, and ask again if that was the answer. False when the server has closed."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self.errors += 1
            return False
        answer = self._unread + data
        head = answer.find(b"\r\n\r\n")
        length = _LENGTH.search(answer, 0, head) if head >= 0 else None
        if length is None or len(answer) < head + 4 + int(length[1]):
            self._unread = answer
            return True
        self.taken.append(time.perf_counter() - self._sent)
        self.errors += not answer.startswith(b"HTTP/1.1 200 ")
        self._unread = b""
        self.send()
        return True

    def median_s(self) -> float:
        """One that was left without any answer has waited at least so long."""
        return median(self.taken) if self.taken else time.perf_counter() - self._sent


def run(port: int, path: str, count: int, seconds: float) -> dict[str, float]:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    poll = select.epoll()
    connections = [Connection(port, head.encode() + BODY) for _ in range(count)]
    by_fd = {connection.socket.fileno(): connection for connection in connections}
    for fd, connection in by_fd.items():
        poll.register(fd, select.EPOLLIN)
        connection.send()
    turn(poll, by_fd, WARM_UP_S)
    for connection in connections:
        connection.taken.clear()
    begun = time.perf_counter()
    turn(poll, by_fd, seconds)
    taken_s = time.perf_counter() - begun
    medians = sorted(connection.median_s() for connection in connections)
    answers = sorted(len(connection.taken) for connection in connections)
    for connection in connections:
        connection.socket.close()
    return {
        "rate": sum(answers) / taken_s,
        "unfairness": medians[-1] / medians[0],
        "fastest_ms": medians[0] * 1e3,
        "slowest_ms": medians[-1] * 1e3,
        "fewest": answers[0],
        "most": answers[-1],
        "errors": sum(connection.errors for connection in connections),
    }


def turn(poll: select.epoll, by_fd: dict[int, Connection], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while (left := deadline - time.perf_counter()) > 0:
        for fd, _ in poll.poll(left):
            if not by_fd[fd].receive():
                poll.unregister(fd)


if __name__ == "__main__":
    port, path, count, seconds = sys.argv[1:]
    print(json.dumps(run(int(port), path, int(count), float(seconds))))

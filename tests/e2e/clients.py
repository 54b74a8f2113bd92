"""Clients in a closed loop that tell their own answer from everybody else's, and keep a ledger of what they saw."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.e2e.stack import Stack, ask, threads
from tests.service.serving import Client

TAG: dict[str, object] = {"model": "tests.models.zoo:Tag", "options": {"ms": 2}, "replicas": 2}


class Clients:
    """Half of them on kept connections, half on a new one for each request; each request has a nonce of its own.

    `killed`: web processes and when they were killed; only a connection to one of those may be cut. `tolerated`:
    codes that are no failure now.
    """

    def __init__(self, stack: Stack, model: str = "tag") -> None:
        self.stack = stack
        self.path = f"/predict/{model}"
        self.killed: dict[int, float] = {}
        self.tolerated: Callable[[str], bool] = lambda code: False
        self.stopping = False
        self.closed_upon = 1
        """How many new connections the end of the service may close unheard."""
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._nonces = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def right(self) -> int:
        return self.counts["right"]

    def run(self, number: int, done: threading.Event) -> None:
        client: Client | None = None
        pid = 0
        while not done.is_set():
            nonce = next(self._nonces)
            began = time.monotonic()
            try:
                if client is None:
                    client, pid = self.stack.connect(), 0
                request_id = f"{nonce}.{number}"
                status, headers, body = ask(client, self.path, b'{"nonce":%d}' % nonce, f"X-Request-ID: {request_id}")
            except OSError as error:
                self._cut(pid, began, error)
                if client is not None:
                    client.socket.close()
                client = None
                done.wait(0.005)
                continue
            pid = int(headers["x-pid"])
            if headers["x-request-id"] != request_id:
                self._note(f"the answer to {request_id} is for {headers['x-request-id']}", failed=True)
            if status == 200:
                right = body == b'{"nonce":%d}' % nonce
                self._note("right" if right else f"{nonce} was answered {body!r}", failed=not right)
            else:
                code = json.loads(body).get("code", "")
                self._note(f"{status} {code}", failed=not self.tolerated(code))
                done.wait(0.005)
            if number % 2 or headers.get("connection") == "close":
                client.socket.close()
                client = None
        if client is not None:
            client.socket.close()

    def _cut(self, pid: int, began: float, error: OSError) -> None:
        if self.stopping:
            # Nobody is cut off by an end in order; a service that has been killed is another matter.
            unheard = self.counts["closed upon"] < self.closed_upon
            if isinstance(error, ConnectionResetError) and not pid and unheard:
                # The kernel may take a connection in the instant between the last accept and the close: no server can
                # tell. One, on a new connection, is that; more, or on a kept one, would be ours.
                self._note("closed upon", failed=False)
                return
            refused = isinstance(error, ConnectionRefusedError)
            self._note(
                "refused" if refused else f"cut at the end: {error!r} by {pid}", failed=not refused and not self.killed
            )
            return
        # On a new connection it is not known yet which process it is with.
        unknown = not pid and any(began - 2.0 < at for at in self.killed.values())
        if unknown:
            self._note("cut when new", failed=False)
        self._note(f"cut: {error!r} by {pid}", failed=not unknown and pid not in self.killed)

    def _note(self, what: str, *, failed: bool) -> None:
        with self._lock:
            self.counts[what] += 1
            if failed:
                self.failures.append(what)


@contextlib.contextmanager
def tagging(stack: Stack, count: int = 8, model: str = "tag") -> Iterator[Clients]:
    """`count` clients under way; at the end none of them may have failed."""
    clients = Clients(stack, model)
    with threads(count, clients.run):
        yield clients
    # A client has one connection at a time, so each kill may cut it once; more are cut by a process that lives.
    assert clients.counts["cut when new"] <= count * len(clients.killed), clients.counts
    told = [line for line in stack.log().splitlines() if " -> " not in line]
    assert clients.failures == [], (clients.counts, told[-50:])

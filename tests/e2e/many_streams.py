"""Many streams at once, read by one thread, each with the times at which its pieces came."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable

from tests.service.sse_client import StreamClient


class Watched(StreamClient):
    """Notes when something has come."""

    def __init__(self, port: int, path: str, *headers: str) -> None:
        super().__init__(port, path, *headers)
        self.times: list[float] = []

    def hear(self) -> None:
        self._receive()
        self.times.append(time.monotonic())

    @property
    def over(self) -> bool:
        return self.whole or self.closed


def read_all(clients: Iterable[Watched], seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Read what comes to any of them until all are over, or `until` says so."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for client in clients:
            if not client.over:
                selector.register(client.socket, selectors.EVENT_READ, client)
        while selector.get_map() and not until():
            assert time.monotonic() < deadline, f"{len(selector.get_map())} streams are not over in time"
            for key, _ in selector.select(0.1):
                client = key.data
                client.hear()
                if client.over:
                    selector.unregister(client.socket)

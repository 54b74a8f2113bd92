"""Each process's connection to the pool, made on first use: after the fork, by the process that needs it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakSet

from service.client import PieceStream, PoolClient
from workers import launch
from workers.errors import PoolLost
from workers.model import Array
from workers.status import ModelStatus

PATIENCE_S = 1.0  # how long a process waits for its pool to introduce itself before it goes on without it


class Connecting(PoolClient, Protocol):
    def start(self) -> None:
        """Begin to connect; returns without waiting."""

    def wait_introduced(self, seconds: float) -> bool: ...


def make_client() -> Connecting:
    """A client of the pool that `HEADRACE_POOL_SOCKET` names, else of the embedded one."""
    relaunch: Callable[[], None] | None = None
    path = os.environ.get("HEADRACE_POOL_SOCKET", "")
    if not path:
        embedded = launch.current()
        if embedded is None:
            raise PoolLost("no pool: none was launched with this server and HEADRACE_POOL_SOCKET is not set")
        path, relaunch = embedded.socket_path, embedded.ensure
    if _socket_is_patched():
        from service.hub import HubClient

        return HubClient(path, relaunch=relaunch)
    from workers.client import ThreadClient

    return ThreadClient(path, relaunch=relaunch)


def open_clients() -> None:
    """Connect what this process will serve with, before it takes requests."""
    for lazy in list(_made):
        lazy.open()


def close_clients() -> None:
    """Close every client this process has made."""
    for lazy in list(_made):
        lazy.close()


class LazyClient:
    """The pool's client, made when it is first asked for anything; a forked child makes its own. From then on this
    object's methods are that client's."""

    def __init__(self) -> None:
        self._client: Connecting | None = None
        self._pid = 0
        self._making = threading.Lock()  # never held while waiting: it may be older than gevent's patching
        self._awaited = False
        _made.add(self)

    def open(self) -> None:
        with contextlib.suppress(PoolLost):
            self._get()

    def statuses(self) -> Mapping[str, ModelStatus]:
        return self._get().statuses()

    def admit(self, model: str) -> ModelStatus:
        return self._get().admit(model)

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> dict[str, Array]:
        return self._get().predict(model, inputs, deadline=deadline, caller=caller)

    def predict_body(
        self,
        model: str,
        body: bytes,
        codec: str,
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> bytes:
        return self._get().predict_body(model, body, codec, deadline=deadline, caller=caller)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> PieceStream:
        return self._get().stream(model, inputs, deadline=deadline, caller=caller)

    def close(self) -> None:
        if self._client is not None and self._pid == os.getpid():
            self._client.close()
        self._client = None
        self.forget()

    def forget(self) -> None:
        """Ask for the client again at the next call."""
        for name in _PASSED_ON:
            self.__dict__.pop(name, None)

    def _get(self) -> PoolClient:
        client = self._client
        if client is None or self._pid != os.getpid():
            client = self._begin()
        if not self._awaited:
            client.wait_introduced(PATIENCE_S)
            self._awaited = True
        if client is self._client:
            for name in _PASSED_ON:
                setattr(self, name, getattr(client, name))
        return client

    def _begin(self) -> Connecting:
        with self._making:
            client = self._client
            if client is None or self._pid != os.getpid():
                client = make_client()
                client.start()
                self._awaited, self._client, self._pid = False, client, os.getpid()
            return client


_PASSED_ON = ("statuses", "admit", "predict", "predict_body", "stream")
_made: WeakSet[LazyClient] = WeakSet()


def _forget_in_child() -> None:
    for lazy in list(_made):
        lazy.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def _socket_is_patched() -> bool:
    """Whether gevent's sockets have taken the standard ones' place; asked without importing gevent."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("socket"))

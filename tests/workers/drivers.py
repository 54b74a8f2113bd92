"""The driver of the client at hand: threads, or gevent's hub where the socket module is patched. One set of tests,
run both ways, holds the two to one contract."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tests.workers.pools import core, send, states, until, wait_free, wait_replicas
from workers import PoolError, ThreadClient
from workers.model import Array
from workers.records import SlotState

_monkey = sys.modules.get("gevent.monkey")
PATCHED = _monkey is not None and bool(_monkey.is_module_patched("socket"))

if PATCHED:
    from service.hub import HubClient as Driver
else:
    Driver = ThreadClient  # type: ignore[assignment,misc]


@contextlib.contextmanager
def client_of(socket_path: str) -> Iterator[Driver]:
    client = Driver(socket_path)
    client.start()
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def client_with(socket_path: str, *models: str) -> Iterator[Driver]:
    """A client once all replicas of `models` are ready, which leaves no slot out."""
    with client_of(socket_path) as client:
        wait_replicas(client, *models)
        yield client
        wait_free(client)


class Call:
    """Something that runs in a thread (a greenlet, if patched) and ends with a value or a `PoolError`."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        try:
            self.value = self._run()
        except BaseException as error:
            self.error = error

    def join(self, seconds: float = 20.0) -> Call:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"no answer within {seconds} s"
        return self

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def result(self, seconds: float = 20.0) -> object:
        """The value; raises the error."""
        self.join(seconds)
        if self.error is not None:
            raise self.error
        return self.value

    def failure(self, seconds: float = 20.0) -> PoolError:
        """The error, which there must be."""
        self.join(seconds)
        assert isinstance(self.error, PoolError), f"{self.error!r}, {self.value!r}"
        return self.error


def predicting(client: Driver, model: str, deadline: float | None = None, **inputs: Array) -> Call:
    return Call(lambda: client.predict(model, inputs, deadline=deadline))


class Pending:
    """A prediction that its caller can give up: by `Future.cancel`, or, with the hub, by hanging up."""

    def __init__(self, client: Driver, model: str, inputs: Mapping[str, Array]) -> None:
        if PATCHED:
            self._near, self._far = socket.socketpair()
            self.call = Call(lambda: client.predict(model, inputs, caller=self._near))
        else:
            future = client.submit(model, inputs)  # type: ignore[attr-defined]
            self._cancel = future.cancel
            self.call = Call(future.result)

    def give_up(self) -> None:
        if PATCHED:
            self._far.close()
        else:
            assert self._cancel()

    def close(self) -> None:
        if PATCHED:
            self._near.close()
            self._far.close()


class Busy:
    """The only worker of `slow`, a `Slow`, is at work until this ends: it is stopped in the middle."""

    def __init__(self, client: Driver, worker: int) -> None:
        self._worker = worker
        self._call = predicting(client, "slow", ms=ms(1000))
        until(lambda: states(client) == [SlotState.RUNNING], "the worker has begun")
        send(worker, signal.SIGSTOP)

    def end(self) -> None:
        send(self._worker, signal.SIGCONT)
        self._call.result()


def refusal(client: Driver) -> PoolError | None:
    """Why no task is taken for `echo`."""
    try:
        client.admit("echo")
    except PoolError as error:
        return error
    return None


def ms(value: float) -> Array:
    """What `Slow` is asked."""
    return np.array([value], np.float32)


def x(*values: float) -> Array:
    """One row."""
    return np.array([values], np.float32)


def wait_depth(client: Driver, model: str, tasks: int) -> None:
    """Until so many of the client's tasks are under way."""
    until(lambda: core(client).under_way == tasks, f"{tasks} tasks of {model} under way: {core(client).under_way}")

"""How each web process of real gunicorn, of any worker class, comes to its connection to the pool and keeps it."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.service.serving import Served, children, gunicorn, until
from tests.workers.pools import PoolProcess, pool
from workers import ThreadClient
from workers.records import RECORD_SIZE

APP = "service:create_app()"
SERVERS = {
    "gevent": (),
    "preloaded": ("--preload",),
    "gthread": ("-k", "gthread", "--threads", "8"),
    "sync": ("-k", "sync"),
}


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """Where a pool would be, and is silent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "pool.sock"))
        listening.listen(64)
        listening.settimeout(20)
        yield listening


@pytest.fixture(scope="module")
def running() -> Iterator[PoolProcess]:
    with pool({"score": {"model": "Echo"}}) as running:
        with ThreadClient(running.socket_path) as client:
            client.wait_ready()
        yield running


@pytest.mark.parametrize("server", ["preloaded", "gthread", "sync"])
def test_the_first_requests_of_a_fresh_process_find_the_pool(running: PoolProcess, server: str) -> None:
    with gunicorn(APP, *SERVERS[server], env={"HEADRACE_POOL_SOCKET": running.socket_path}) as served:
        assert statuses_at_once(served, 8) == [b"200"] * 8
        until(lambda: served.log().count("POST /score -> 200 ") == 8, "each has its line in the log")


@pytest.mark.parametrize("server", ["gevent", "preloaded"])
def test_a_web_process_connects_before_its_first_request_and_a_silent_pool_hangs_nobody(
    listener: socket.socket, server: str
) -> None:
    env = {"HEADRACE_POOL_SOCKET": listener.getsockname()}
    with gunicorn(APP, *SERVERS[server], env=env) as served:
        connected, _ = listener.accept()
        with connected:
            started = time.monotonic()
            assert statuses_at_once(served, 8) == [b"503"] * 8
            assert time.monotonic() - started < 5


@pytest.mark.parametrize("server", ["gevent", "gthread"])
def test_what_a_caller_that_has_left_had_asked_for_is_not_run(server: str) -> None:
    with pool({"score": {"model": "Slow", "max_batch": 1}}) as running, ThreadClient(running.socket_path) as client:
        client.wait_ready()
        with gunicorn(APP, *SERVERS[server], env={"HEADRACE_POOL_SOCKET": running.socket_path}) as served:
            first = client.submit("score", {"ms": np.array([1000.0], np.float32)})
            until(lambda: queued(client) == 0, "the first has been taken")
            with served.connect() as leaving:
                leaving.send(scoring(b'{"ms":20000}'))
                until(lambda: queued(client) == 1, "it waits behind the first")
            first.result()
            started = time.monotonic()
            assert served.exchange(scoring(b'{"ms":0}'))[9:12] == b"200"
            assert time.monotonic() - started < 5


def queued(client: ThreadClient) -> int:
    """Records in the model's queue, from whatever client."""
    assert client._connection is not None
    depth = fcntl.ioctl(client._connection._queues["score"], termios.FIONREAD, bytes(4))
    return int.from_bytes(depth, "little") // RECORD_SIZE


def scoring(body: bytes) -> bytes:
    return b"POST /score HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("server", ["gevent", "gthread"])
def test_a_process_out_of_descriptors_connects_once_it_has_some(tmp_path: Path, server: str) -> None:
    path = str(tmp_path / "pool.sock")
    with gunicorn(APP, *SERVERS[server], env={"HEADRACE_POOL_SOCKET": path}) as served:
        (web,) = children(served.process.pid)
        before = resource.prlimit(web, resource.RLIMIT_NOFILE)

        def has_none_left() -> bool:
            # Again each time: what is used is not the same from one moment to the next.
            resource.prlimit(web, resource.RLIMIT_NOFILE, (lowest_free(web), before[1]))
            return "Too many open files" in served.log()

        until(has_none_left, "the process has no descriptors left")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(path)
            listening.listen()
            listening.settimeout(10)
            resource.prlimit(web, resource.RLIMIT_NOFILE, before)
            listening.accept()[0].close()


def statuses_at_once(served: Served, requests: int) -> list[bytes]:
    with ThreadPoolExecutor(requests) as threads:
        return [
            answer[9:12] for answer in threads.map(lambda _: served.exchange(scoring(b'{"x":[1,2]}')), range(requests))
        ]


def lowest_free(pid: int) -> int:
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(fd for fd in range(len(used) + 1) if fd not in used)

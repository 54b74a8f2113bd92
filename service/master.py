"""What Headrace adds to gunicorn's master process: a start that fails in one line, the pool, a HUP that cannot
take the service down.

All of it hangs on the one arbiter it is given; nothing of gunicorn is patched for others.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from gunicorn.util import is_ipv6

from service.descriptors import make_room

_CHECK_S = 60.0
_CHECK_POLL_S = 0.1
_ONE_SIGNAL_S = 0.5
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


def prepare(arbiter: Any) -> None:
    """Before the master binds: refuse what cannot work, then start the pool that comes with this server."""
    if not _inherits_sockets(arbiter):
        for address in arbiter.cfg.address:
            _refuse_if_taken(arbiter, address)
    _make_room(arbiter.cfg.worker_connections)
    if not os.environ.get("HEADRACE_POOL_SOCKET"):
        _start_pool(arbiter)
    spawn_worker = arbiter.spawn_worker
    arbiter.spawn_worker = lambda: _spawn(spawn_worker)
    os.register_at_fork(after_in_child=_forked)
    arbiter.handle_int = arbiter.handle_quit = arbiter.handle_term
    _hurry_at_the_second(arbiter)
    reload = arbiter.handle_hup
    arbiter.handle_hup = lambda: _reload(arbiter, reload)


def announce(arbiter: Any) -> None:
    """The one line of a start that went well."""
    print("Listening on " + ", ".join(map(str, arbiter.LISTENERS or arbiter.cfg.bind)), flush=True)


def clean_up() -> None:
    for sig in _STOPPING:  # all is done: one more must not turn a good end into a death by signal
        signal.signal(sig, signal.SIG_IGN)
    launch = sys.modules.get("workers.launch")  # not imported again: it holds the pool, if there is one
    embedded = launch.current() if launch is not None else None
    if embedded is not None:
        embedded.remove()


# Starting


def _inherits_sockets(arbiter: Any) -> bool:
    activated = os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS", "0") != "0"
    return activated or bool(arbiter.master_pid)


def _refuse_if_taken(arbiter: Any, address: tuple[str, int] | str | int) -> None:
    """Bind and let go: gunicorn itself would try five times in five seconds and say so in ten lines."""
    if isinstance(address, int):
        return  # a descriptor, bound already
    try:
        if isinstance(address, str):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(address) == 0:  # gunicorn would take the path from whoever listens there
                    _give_up(arbiter, f"unix:{address} is in use by another process")
            return
        with socket.socket(socket.AF_INET6 if is_ipv6(address[0]) else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if arbiter.cfg.reuse_port:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(address)
    except OSError as error:
        _give_up(arbiter, f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}")


def _make_room(connections: int) -> None:
    fitting = make_room(connections)
    if fitting < connections:
        print(
            f"Warning: the limit of open files (ulimit -Hn) leaves room for {fitting} connections in each web process, "
            f"not for {connections} (worker_connections)",
            file=sys.stderr,
            flush=True,
        )


def _start_pool(arbiter: Any) -> None:
    from workers import launch
    from workers.config import ConfigError, load

    try:
        launch.check_memory(load(os.environ.get("HEADRACE_CONFIG") or None), arbiter.cfg.workers)
    except (ConfigError, launch.NotEnoughMemory) as error:
        _give_up(arbiter, str(error))
    # No signal may come between making the directory and knowing of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        launch.prepare(arbiter.cfg.uid, arbiter.cfg.gid).ensure()
    except OSError as error:
        why = error.strerror or str(error)
        _give_up(arbiter, f"the pool's files cannot be made in {error.filename} (HEADRACE_RUNTIME_DIR): {why}")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


_spawning = False


def _spawn(spawn_worker: Callable[[], int]) -> int:
    """Fork a web process with the signals to stop held back until it has handlers of its own. It has the master's
    at first, and a signal that reached those would be taken note of and never acted on."""
    global _spawning
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    _spawning = True
    try:
        return spawn_worker()
    finally:
        _spawning = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _forked() -> None:
    if _spawning:
        for sig in _STOPPING:  # until the worker class sets its own, there is nothing to finish
            signal.signal(sig, lambda *_: os._exit(0))  # `sys.exit` could be swallowed wherever it falls
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)


def _give_up(arbiter: Any, reason: str) -> NoReturn:
    if arbiter.pidfile is not None:
        arbiter.pidfile.unlink()
    print(f"Error: {reason}", file=sys.stderr, flush=True)
    sys.exit(1)


# Stopping


def _hurry_at_the_second(arbiter: Any) -> None:
    """A second signal to stop, whichever it is, becomes the SIGINT at which gunicorn makes haste. Not one that comes
    with the first: `timeout` and others signal a process and then its whole group."""
    first = 0.0

    def take(sig: int, frame: object) -> None:
        nonlocal first
        if sig in _STOPPING:
            now = time.monotonic()
            if not first:
                first = now
            elif now - first > _ONE_SIGNAL_S:
                sig = signal.SIGINT
            elif sig == signal.SIGTERM:
                return
        arbiter.SIG_QUEUE.put_nowait(sig)

    arbiter.signal = take


# Reloading


def _reload(arbiter: Any, reload: Any) -> None:
    """HUP: try the new configuration and application in a process of their own first. In the master the first
    would end it at once, and a web process that cannot load the second would end it soon after."""
    problem = _check(arbiter)
    if problem is not None:
        arbiter.log.error("Reload refused, the service runs on as it was: %s", problem)
        return
    if not arbiter.cfg.preload_app:
        _forget_code()
    # gunicorn waits here until the old web processes have finished, and looks at no signal meanwhile; but reaps.
    reap = arbiter.reap_workers
    arbiter.reap_workers = lambda: _reap_or_stop(arbiter, reap)
    try:
        reload()
    finally:
        arbiter.reap_workers = reap


def _reap_or_stop(arbiter: Any, reap: Callable[[], None]) -> None:
    reap()
    if _must_stop(arbiter, taking_it=True):
        raise StopIteration  # gunicorn's own word for a graceful stop


def _check(arbiter: Any) -> str | None:
    """What is wrong with what a HUP would load; None when nothing is."""
    command = [sys.executable, "-m", "gunicorn", *sys.argv[1:], "--check-config"]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            cwd=arbiter.START_CTX["cwd"],
            env=arbiter.cfg.env_orig,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + _CHECK_S
        while child.poll() is None:
            stopping = _must_stop(arbiter)
            if stopping or time.monotonic() > until:
                child.kill()
                child.wait()
                return "the server is to stop" if stopping else f"the check took more than {_CHECK_S:.0f} s"
            time.sleep(_CHECK_POLL_S)
        if child.returncode == 0:
            return None
        output.seek(0)
        lines = [line.strip() for line in output.read()[-65536:].decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), f"the check exited with {child.returncode}")[:500]


def _must_stop(arbiter: Any, taking_it: bool = False) -> bool:
    """Whether a signal to stop waits in the master's queue; `taking_it` removes the first one."""
    waiting = []
    try:
        while True:
            waiting.append(arbiter.SIG_QUEUE.get_nowait())
    except queue.Empty:
        pass
    stopping = next((sig for sig in waiting if sig in _STOPPING), None)
    if taking_it and stopping is not None:
        waiting.remove(stopping)
    for sig in waiting:
        arbiter.SIG_QUEUE.put_nowait(sig)
    return stopping is not None


def _forget_code() -> None:
    """Let the web processes to come load what of ours this process has loaded. `workers.launch` stays, for it
    holds the running pool."""
    for name in list(sys.modules):
        package = name.partition(".")[0]
        if package in ("service", "workers") and name != "workers.launch":
            del sys.modules[name]

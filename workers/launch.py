"""Starting the pool beside a web server, once, and again when it is lost.

A private directory of this instance holds the control socket and two lock files. `owner.lock` is locked by the
web server and inherited by its web processes, `pool.lock` by the pool: whoever finds one free knows that its
holder is gone, whatever killed it. The lifeline is a pipe whose write end the web server and all its web
processes hold; the pool has the read end, and ends with the last of them. Anyone who finds the pool gone may
start another: of several started at once, the one that gets the lock stays.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from workers.arena import NotEnoughMemory, available_bytes
from workers.config import PoolConfig
from workers.inbox import ENTRIES
from workers.records import RECORD_SIZE

LIFELINE_FD = 3
RETRY_S = 1.0
YOUNG_S = 60.0
LONGEST_SOCKET_PATH = 107

__all__ = ["Embedded", "NotEnoughMemory", "check_memory", "current", "prepare"]

_current: Embedded | None = None


class Embedded:
    """The pool of this web server. Inherited by fork; `ensure` may be called in any of its processes."""

    def __init__(self, directory: Path, user: int, group: int) -> None:
        self.directory = directory
        self._user = user
        self._group = group
        self.socket_path = str(directory / "pool.sock")
        self._lifeline_read, self._lifeline_write = os.pipe2(os.O_CLOEXEC)
        self._owner = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._children: list[tuple[int, int]] = []
        self._last_start = -RETRY_S

    def ensure(self) -> None:
        """Start the pool if none lives. Returns at once; callers try to connect again a little later."""
        self._reap()
        now = time.monotonic()
        if now - self._last_start < RETRY_S or locked(self.directory / "pool.lock"):
            return
        self._last_start = now
        self._children.append((os.getpid(), self._spawn()))

    def _spawn(self) -> int:
        # posix_spawn: a program of its own, from whatever process this is, without a copy of its memory, and
        # without the descriptors (listening sockets among them) that the web server keeps inheritable.
        actions: list[tuple[int, int] | tuple[int, int, int] | tuple[int, int, str, int, int]]
        actions = [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable_fds() if fd > 2]
        actions += [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, self._lifeline_read, LIFELINE_FD),
        ]
        command = [sys.executable, "-m", "workers", "--directory", str(self.directory)]
        command += ["--lifeline", str(LIFELINE_FD)]
        if (os.geteuid(), os.getegid()) != (self._user, self._group):
            command += ["--user", str(self._user), "--group", str(self._group)]
        return os.posix_spawn(
            sys.executable,
            command,
            os.environ,
            file_actions=actions,
            setsid=True,
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
        )

    def _reap(self) -> None:
        for child in list(self._children):
            parent, pid = child
            try:
                gone = parent != os.getpid() or os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                gone = True
            if gone:
                self._children.remove(child)

    def remove(self) -> None:
        """The web server ends: its directory goes."""
        shutil.rmtree(self.directory, ignore_errors=True)


def prepare(user: int | None = None, group: int | None = None) -> Embedded:
    """Make this instance's directory (below `HEADRACE_RUNTIME_DIR`, else the user's or the system's directory for
    such things), having removed those whose instance is gone. `user` and `group` are those of the web processes;
    the pool, and with it every model, runs as them too. `OSError` names what stands in the way."""
    global _current
    given = os.environ.get("HEADRACE_RUNTIME_DIR")
    root = Path(given or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not given and not root.is_dir():
        root = Path(tempfile.gettempdir())
    prefix = f"headrace-{os.getuid()}-"
    _sweep(root, prefix)
    directory = root / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
    if len(os.fsencode(directory / "pool.sock")) > LONGEST_SOCKET_PATH:
        raise OSError(errno.ENAMETOOLONG, "too long for a socket in it", str(root))
    directory.mkdir(mode=0o700)
    user = os.geteuid() if user is None else user
    group = os.getegid() if group is None else group
    if os.geteuid() == 0:
        os.chown(directory, user, group)
    _current = Embedded(directory, user, group)
    return _current


def current() -> Embedded | None:
    """What `prepare` made in this process or in the one it was forked from."""
    return _current


def check_memory(config: PoolConfig, web_processes: int) -> None:
    """Refuse to start what could not be reserved: an arena for each web process and the workers' inboxes."""
    inboxes = sum(model.replicas * (ENTRIES + model.max_batch * RECORD_SIZE) for model in config.models)
    needed = web_processes * config.arena.total_bytes + inboxes
    available = available_bytes()
    if needed > available:
        raise NotEnoughMemory(
            f"shared memory of {needed} bytes is needed ({web_processes} web processes x "
            f"{config.arena.total_bytes} bytes) and {available} bytes are available"
        )


def locked(path: Path) -> bool:
    """Somebody alive holds the lock file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _sweep(root: Path, prefix: str) -> None:
    for directory in root.glob(f"{prefix}*"):
        try:
            status = directory.stat()
        except OSError:
            continue
        # One that is just being made has no lock yet.
        young = time.time() - status.st_mtime < YOUNG_S and not (directory / "owner.lock").exists()
        in_use = young or locked(directory / "owner.lock") or locked(directory / "pool.lock")
        if os.geteuid() in (0, status.st_uid) and not in_use:
            shutil.rmtree(directory, ignore_errors=True)


def _inheritable_fds() -> list[int]:
    fds = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                fds.append(int(name))
        except OSError:
            # The listing's own descriptor.
            continue
    return fds

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
from struct import Struct

from workers.arena import NotEnoughMemory, available_bytes
from workers.config import PoolConfig
from workers.inbox import ENTRIES
from workers.records import RECORD_SIZE

LIFELINE_FD = 3
RETRY_S = 1.0
YOUNG_S = 60.0
LONGEST_SOCKET_PATH = 107
LONGEST_WAIT_S = 8.0
SOON_S = 30.0
"""A pool that ends by itself before that could not start."""
_FLOCK = Struct("hhqqi0q")  # the system's: type, whence, start, length, process
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)

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
        # It appears under its name when it is locked: free, it means that its holder is gone.
        self._owner = lock(directory / "owner.new")
        os.rename(directory / "owner.new", directory / "owner.lock")
        self._children: list[tuple[int, int, float]] = []
        self._last_start = -RETRY_S
        self._wait_s = RETRY_S

    def ensure(self) -> None:
        """Start the pool if none lives. Returns at once; callers try to connect again a little later."""
        self._reap()
        now = time.monotonic()
        if now - self._last_start < self._wait_s or locked(self.directory / "pool.lock"):
            return
        self._last_start = now
        self._children.append((os.getpid(), self._spawn(), now))

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
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD],
        )

    def _reap(self) -> None:
        for child in list(self._children):
            parent, pid, started = child
            try:
                gone, status = os.waitpid(pid, os.WNOHANG) if parent == os.getpid() else (pid, 0)
            except ChildProcessError:
                gone, status = pid, 0
            if gone == pid:
                self._children.remove(child)
                lasted_s = time.monotonic() - started
                self._wait_s = next_wait_s(self._wait_s, os.waitstatus_to_exitcode(status), lasted_s)

    def remove(self) -> None:
        """The web server ends: its directory goes."""
        shutil.rmtree(self.directory, ignore_errors=True)


def next_wait_s(wait_s: float, status: int, lasted_s: float) -> float:
    """Seconds between two starts, after one that ended with `status`: more and more while the pool cannot start."""
    if status > 0 and lasted_s < SOON_S:
        return min(2 * wait_s, LONGEST_WAIT_S)
    return RETRY_S


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


def lock(path: Path) -> int:
    """Hold the lock file: until the last process that has the descriptor which is returned, inherited or not, has
    closed it. -1 if another holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except BlockingIOError:
        os.close(fd)
        return -1
    except BaseException:
        os.close(fd)
        raise
    return fd


def locked(path: Path) -> bool:
    """Somebody alive holds the lock file, or it is another user's. Asked without taking the lock for a moment, in
    which whoever wants it would find it taken."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except PermissionError:
        return True
    try:
        found: int = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE))[0]
    finally:
        os.close(fd)
    return found != fcntl.F_UNLCK


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

"""`python -m workers`: the pool as a program of its own.

Beside a web server it is started by `workers.launch` with its directory and lifeline; alone, under a unit of its
own, it listens at `HEADRACE_POOL_SOCKET` and runs until SIGTERM, which drains it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import resource
import sys
from pathlib import Path

import setproctitle

from workers import launch, log
from workers.config import ConfigError, load
from workers.pool import CannotStart, Pool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers", description="Run the pool of compute processes.")
    parser.add_argument("--directory", type=Path, help="private directory of a web server's own pool")
    parser.add_argument("--lifeline", type=int, help="descriptor whose end of file ends the pool")
    parser.add_argument("--user", type=int, help="user id to run as")
    parser.add_argument("--group", type=int, help="group id to run as")
    options = parser.parse_args(arguments)
    _become(options.user, options.group)
    socket_path = str(options.directory / "pool.sock") if options.directory else os.environ.get("HEADRACE_POOL_SOCKET")
    if not socket_path:
        parser.error("name the control socket in HEADRACE_POOL_SOCKET")
    log.start("%(asctime)s %(levelname)s pool %(message)s")
    try:
        config = load(os.environ.get("HEADRACE_CONFIG") or None)
        lock = launch.lock(Path(socket_path).with_suffix(".lock"))
    except (ConfigError, OSError) as error:
        if options.directory and not options.directory.exists():
            # The web server has been ended while it started.
            return 0
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    if lock < 0:
        if options.directory:
            # Several web processes missed the pool at once; another one's is already there.
            return 0
        print(f"headrace: another pool listens at {socket_path}", file=sys.stderr)
        return 1
    setproctitle.setproctitle("headrace pool")
    if options.lifeline is not None:
        # No worker may hold what the pool's life hangs on.
        os.set_inheritable(options.lifeline, False)
    # Each client costs four descriptors, each worker six, each oversized tensor under way one.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        Pool(config, socket_path, options.lifeline).run()
    except CannotStart as error:
        print(f"headrace: the pool cannot start: {error}", file=sys.stderr)
        return 1
    return 0


def _become(user: int | None, group: int | None) -> None:
    """Lay down the rights of the one who started this, before anything of a model is touched."""
    if group is not None:
        os.setgroups([])
        os.setgid(group)
    if user is not None:
        with contextlib.suppress(KeyError, PermissionError):
            entry = pwd.getpwuid(user)
            os.initgroups(entry.pw_name, entry.pw_gid if group is None else group)
        os.setuid(user)


if __name__ == "__main__":
    sys.exit(main())

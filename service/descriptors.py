"""Room for connections: each is a file descriptor, and the usual limit of a process is for far fewer.

The gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

import resource

_OTHERS = 128  # what a web process holds besides: listening sockets, the pool's, logs, files that are served


def make_room(connections: int) -> int:
    """Raise this process's limit so far that so many connections fit; how many of them do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if _is_less(soft, wanted):
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, soft - _OTHERS) if _is_less(soft, wanted) else connections


def _is_less(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted

"""How connections come to a web process: accepted, and the TLS handshake done, with an end to both.

The gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

import errno
import logging
import ssl
from typing import Any

import gevent
from gevent.server import StreamServer

_ACCEPT_REST = 1024
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger("headrace")


class Listener:
    """What connections ask of the listening socket, also after it has been closed."""

    def __init__(self, name: Any) -> None:
        self._name = name

    def getsockname(self) -> Any:
        return self._name


class Server(StreamServer):  # type: ignore[misc]
    def accept_rest(self) -> None:
        """Take what clients have been told is connected: closing the socket would reset it."""
        self.stop_accepting()
        for _ in range(_ACCEPT_REST):
            accepted = None if self.full() else self.do_read()
            if not accepted:
                return
            self.do_handle(*accepted)

    def do_read(self) -> Any:
        try:
            return super().do_read()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            logger.warning("cannot accept connections: %s", error.strerror)
        self.stop_accepting()
        gevent.spawn_later(1.0, self._accept_again)
        return None

    def _accept_again(self) -> None:
        if self.started:
            self.start_accepting()


def shake_hands(context: ssl.SSLContext, client: Any, seconds: float) -> Any:
    """The connection under TLS; None, and closed, when its handshake fails or takes longer.

    Not left to gevent's server, whose handshake waits for ever.
    """
    try:
        with gevent.Timeout(seconds, TimeoutError):  # a timeout of the socket's would be one for each of its waits
            return context.wrap_socket(client, server_side=True)
    except OSError:  # also what TLS itself finds wrong
        client.close()
        return None

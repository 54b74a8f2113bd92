"""The lean way of one connection: which requests it takes, and what every one of them has in its environ.

What this way does is what gunicorn would have done; where a setting of gunicorn's asks for more, `may_be_lean` says no.
The gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gunicorn.http.message import _ip_in_allow_list
from gunicorn.http.wsgi import WSGIErrorsWrapper

from service.connection import Reader
from service.environ import WATCH_KEY
from service.plain import HeadReader, PlainRequest

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment


def may_be_lean(cfg: Any, log: Any) -> bool:
    """Whether gunicorn's configuration lets plain requests pass its own parser by."""
    return not (
        cfg.is_ssl
        or cfg.proxy_protocol != "off"
        or os.environ.get("SCRIPT_NAME")
        or any(getattr(cfg, hook) is not cfg.settings[hook].default for hook in ("pre_request", "post_request"))
        or log.error_log.isEnabledFor(logging.DEBUG)  # gunicorn's hooks log each request then
    )


class Errors(io.RawIOBase):
    """`wsgi.errors`: gunicorn's own, which holds the streams of the moment it is made in, made anew for each line. A
    log that is reopened is another stream."""

    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def write(self, data: Any) -> int:
        WSGIErrorsWrapper(self._cfg).write(data)
        return len(data)


class Lean:
    """Takes the plain requests of a connection. `environ`: of every request of this process. `server`: the name of the
    listening socket, `peer` that of the client."""

    def __init__(
        self, heads: HeadReader, reader: Reader, environ: Mapping[str, Any], cfg: Any, server: Any, peer: Any
    ) -> None:
        self._heads = heads
        self._reader = reader
        self._environ = {
            **environ,
            "gunicorn.socket": reader.sock,
            WATCH_KEY: reader.watch,
            "wsgi.url_scheme": "http",
            "SCRIPT_NAME": "",
            "REMOTE_ADDR": peer[0] if isinstance(peer, tuple) else os.fsdecode(peer),
        }
        name = [*server.split(":"), ""] if isinstance(server, str) else server
        self._by_host = isinstance(server, str) and len(name) == 2
        self._environ.update(SERVER_NAME=name[0], SERVER_PORT=str(name[1]))
        self._trusted = not isinstance(peer, tuple)
        if isinstance(peer, tuple):
            self._environ["REMOTE_PORT"] = str(peer[1])
            self._trusted = _ip_in_allow_list(peer[0], cfg.forwarded_allow_ips, cfg.forwarded_allow_networks())

    def next(self) -> tuple[PlainRequest, WSGIEnvironment] | None:
        """The next request, with its environ; None when it is not plain: gunicorn's parser finds it with the reader."""
        head = self._reader.next_head(self._heads.max_head)
        if not head:
            return None
        found = self._heads.read(head, self._environ, self._trusted)
        if found is None:
            self._reader.put_back(head)
        elif self._by_host:
            _name_server(found[1])
        return found


def _name_server(environ: dict[str, Any]) -> None:
    """On a Unix socket the client's word comes first."""
    host = environ.get("HTTP_HOST")
    if host:
        name, *port = host.split(":")
        environ["SERVER_NAME"] = name
        environ["SERVER_PORT"] = port[0] if port else "443" if environ["wsgi.url_scheme"] == "https" else "80"

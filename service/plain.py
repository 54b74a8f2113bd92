"""The head of a plain request, taken apart: bytes in, a request and its WSGI environ out. No socket, no clock.

`httptools` (llhttp, in C) splits a head into its fields. What is plain is decided here, and narrowly: whatever a
careful reader could doubt is left to gunicorn's own parser, which knows every rule and every refusal. So nothing is
refused here, and what is taken reads as gunicorn would have read it. The gunicorn master loads this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import httptools

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

MAX_HEAD = 8190
"""Bytes of the largest plain head: none of its lines can be over a limit of gunicorn's own."""

# One of the usual methods, an origin-form target that is not `//…` and has no fragment, a version of HTTP/1.
_LINE = re.compile(
    rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/(?:[!\"$-.0->@-~][!\"$->@-~]*)?)(\?[!\"$-~]*)? HTTP/1\.([01])\r\n"
)
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
_NAME = re.compile(rb"[!#$%&'*+\-.^`|~0-9A-Za-z]{1,128}")  # a token without `_`, which an environ cannot tell from `-`
_VERSIONS = {b"1": ("HTTP/1.1", (1, 1)), b"0": ("HTTP/1.0", (1, 0))}
_MAX_DIGITS = 15
_MAX_NAMES = 1024

# What these ask for changes how a body or the rest of the connection is read.
_UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings"})


class _Fields(list[tuple[bytes, bytes]]):
    """What the parser hands the fields of one head to."""

    __slots__ = ()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.append((name, value))


class PlainRequest:
    """What gunicorn's response and access log ask of a request. `length`: bytes of the body. `body`: where the body is
    read from, None when all of it has come with the head."""

    __slots__ = ("_fields", "_keeps_alive", "body", "environ", "length", "method", "version")

    def __init__(
        self,
        environ: WSGIEnvironment,
        fields: list[tuple[bytes, bytes]],
        method: str,
        version: tuple[int, int],
        length: int,
        keeps_alive: bool,
    ) -> None:
        self.environ = environ
        self.method = method
        self.version = version
        self.length = length
        self.body: Any = None
        self._fields = fields
        self._keeps_alive = keeps_alive

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(n.decode("ascii").upper(), v.strip(b" \t").decode("latin-1")) for n, v in self._fields]

    @property
    def path(self) -> str:
        return self.uri.partition("?")[0]

    @property
    def uri(self) -> str:
        uri: str = self.environ["RAW_URI"]
        return uri

    def should_close(self) -> bool:
        return not self._keeps_alive


class HeadReader:
    """Reads heads under the limits of gunicorn's configuration `cfg`."""

    def __init__(self, cfg: Any) -> None:
        limits = (cfg.limit_request_line, cfg.limit_request_field_size, MAX_HEAD)
        self.max_head = min(limit for limit in limits if limit > 0)
        self._max_fields = cfg.limit_request_fields if cfg.limit_request_fields > 0 else MAX_HEAD
        schemes = cfg.secure_scheme_headers.items()
        self._schemes = [("HTTP_" + name.replace("-", "_"), secure) for name, secure in schemes]
        self._keys: dict[bytes, str] = {}

    def read(self, head: bytes, base: Mapping[str, Any], trusted: bool) -> PlainRequest | None:
        """The request of `head`, which ends with its empty line; None if it is not plain. `base`: the environ of every
        request on this connection. `trusted`: whether the peer may say that its own client used TLS."""
        line = _LINE.match(head)
        fields = _Fields()
        try:
            httptools.HttpRequestParser(fields).feed_data(head)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        lines = len(fields) + 2
        if (
            line is None
            or len(fields) > self._max_fields
            or head.count(b"\n") != lines
            or head.count(b"\r") != lines
            or len(head.translate(None, _CONTROLS)) != len(head)
        ):
            return None
        environ = dict(base)
        keys = self._keys
        for name, value in fields:
            key = keys.get(name) or self._key(name)
            if key is None:
                return None
            environ[key] = value.strip(b" \t").decode("latin-1")
        if len(environ) != len(base) + len(fields):
            return None  # a field is repeated
        length = _length(environ.get("CONTENT_LENGTH", "0"))
        if length < 0 or (trusted and not self._find_scheme(environ)):
            return None
        verb, path, query, minor = line.group(1, 2, 3, 4)
        environ["REQUEST_METHOD"] = method = verb.decode("ascii")
        environ["PATH_INFO"] = (unquote_to_bytes(path) if b"%" in path else path).decode("latin-1")
        environ["QUERY_STRING"] = query[1:].decode("ascii") if query else ""
        environ["RAW_URI"] = (path + query if query else path).decode("ascii")
        environ["SERVER_PROTOCOL"], version = _VERSIONS[minor]
        connection = environ.get("HTTP_CONNECTION", "").lower()
        keeps_alive = connection == "keep-alive" or (connection != "close" and version == (1, 1))
        return PlainRequest(environ, fields, method, version, length, keeps_alive)

    def _key(self, name: bytes) -> str | None:
        """The key in an environ that a field goes by; None for one that is not plain."""
        if _NAME.fullmatch(name) is None or name.lower() in _UNUSUAL:
            return None
        key = name.decode("ascii").upper().replace("-", "_")
        if key not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            key = "HTTP_" + key
        if len(self._keys) < _MAX_NAMES:
            self._keys[name] = key
        return key

    def _find_scheme(self, environ: WSGIEnvironment) -> bool:
        """Whether the proxy's fields do not contradict each other."""
        said = {environ[key] == secure for key, secure in self._schemes if key in environ}
        if said == {True}:
            environ["wsgi.url_scheme"] = "https"
        return len(said) < 2


def _length(declared: str) -> int:
    plain = declared.isascii() and declared.isdigit() and len(declared) <= _MAX_DIGITS
    return int(declared) if plain else -1

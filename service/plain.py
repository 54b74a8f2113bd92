"""The head of a plain request, taken apart: bytes in, a request and its WSGI environ out. No socket, no clock.

`httptools` (llhttp, in C) splits a head into its fields. What is plain is decided here, and narrowly: whatever a
careful reader could doubt is left to gunicorn's own parser, which knows every rule and every refusal. So nothing is
refused here, and what is taken reads as gunicorn would have read it. The gunicorn master loads this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote_to_bytes

import httptools

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

MAX_HEAD = 8190
"""Bytes of the largest plain head: none of its lines can be over a limit of gunicorn's own."""

# One of the usual methods, an origin-form target that is not `//…` and has no fragment, a version of HTTP/1.
_LINE = re.compile(
    rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/(?:[!\"$-.0->@-~][!\"$->@-~]*)?)(\?[!\"$-~]*)? HTTP/1\.([01])"
)
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
_NAME = re.compile(rb"[!#$%&'*+\-.^`|~0-9A-Za-z]{1,128}")  # a token without `_`, which an environ cannot tell from `-`
_MAX_DIGITS = 15
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 512

# What these ask for changes how a body or the rest of the connection is read.
_UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings"})

# What is remembered: what comes again and again, and what nobody minds to have in this process's memory for long. A
# query, a cookie or an authorization may be a secret.
_REMEMBERED = frozenset(
    b"host user-agent accept accept-encoding accept-language accept-charset content-type content-length connection "
    b"cache-control pragma origin via x-forwarded-proto x-forwarded-host x-forwarded-port sec-ch-ua sec-ch-ua-mobile "
    b"sec-ch-ua-platform sec-fetch-dest sec-fetch-mode sec-fetch-site sec-fetch-user priority".split()
)


class _Fields(list[tuple[bytes, bytes]]):
    """What the parser hands the fields of one head to."""

    __slots__ = ()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.append((name, value))


class _Line(NamedTuple):
    """What a request line means."""

    environ: dict[str, str]
    method: str
    version: tuple[int, int]
    keeps_alive: bool


class _Head(NamedTuple):
    """What a whole head means. `scheme`: what a proxy says of its client, `HeadReader._scheme`."""

    environ: dict[str, str]
    lines: list[bytes]
    line: _Line
    length: int
    keeps_alive: bool
    scheme: bool | None


class PlainRequest:
    """What gunicorn's response and access log ask of a request. `length`: bytes of the body. `body`: where the body is
    read from, None when all of it has come with the head. It knows nothing of its environ, which leads to it: that
    would be a circle, and all of a request would lie there until the collector comes."""

    __slots__ = ("_head", "body", "length", "method", "version")

    def __init__(self, head: _Head) -> None:
        self._head = head
        _, _, line, self.length, _, _ = head
        _, self.method, self.version, _ = line
        self.body: Any = None

    @property
    def uri(self) -> str:
        return self._head.environ["RAW_URI"]

    @property
    def headers(self) -> list[tuple[str, str]]:
        pairs = (text.decode("latin-1").partition(":") for text in self._head.lines[1:])
        return [(name.upper(), value.strip(" \t")) for name, _, value in pairs]

    @property
    def path(self) -> str:
        return self.uri.partition("?")[0]

    @property
    def query(self) -> str:
        return self.uri.partition("?")[2]

    def should_close(self) -> bool:
        return not self._head.keeps_alive


class HeadReader:
    """Reads heads under the limits of gunicorn's configuration `cfg`.

    Most lines of most heads have come before, from this client or another like it, so lines are remembered with what
    they mean, and only those that are new are parsed. So are heads that hold nothing else.
    """

    def __init__(self, cfg: Any) -> None:
        limits = (cfg.limit_request_line, cfg.limit_request_field_size, MAX_HEAD)
        self.max_head = min(limit for limit in limits if limit > 0)
        self._max_lines = 1 + (cfg.limit_request_fields if cfg.limit_request_fields > 0 else MAX_HEAD)
        schemes = cfg.secure_scheme_headers.items()
        self._schemes = [("HTTP_" + name.replace("-", "_"), secure) for name, secure in schemes if "_" not in name]
        self._known_lines: dict[bytes, _Line] = {}
        self._known_fields: dict[bytes, tuple[str, str]] = {}
        self._known_heads: dict[bytes, _Head] = {}

    def read(self, head: bytes, base: Mapping[str, Any], trusted: bool) -> tuple[PlainRequest, WSGIEnvironment] | None:
        """The request of `head`, which ends with its empty line, and its environ; None if it is not plain. `base`: the
        environ of every request on this connection. `trusted`: whether the peer may say that its client used TLS."""
        known = self._known_heads.get(head)
        if known is None:
            known = self._read(head)
            if known is None:
                return None
        environ = dict(base)
        environ.update(known.environ)
        if trusted and known.scheme is not False:
            if known.scheme is None:
                return None
            environ["wsgi.url_scheme"] = "https"
        return PlainRequest(known), environ

    def _read(self, head: bytes) -> _Head | None:
        lines = head[:-4].split(b"\r\n")
        line = self._known_lines.get(lines[0]) or self._read_line(lines[0])
        if line is None or len(lines) > self._max_lines:
            return None
        environ: dict[str, str] = {}
        known = self._known_fields
        new = []
        for text in lines[1:]:
            field = known.get(text)
            if field is None:
                new.append(text)
            else:
                environ[field[0]] = field[1]
        if new:
            fields = self._read_fields(new)
            if fields is None:
                return None
            environ.update(fields)
        if len(environ) != len(lines) - 1:
            return None  # a field is repeated
        length = _length(environ["CONTENT_LENGTH"]) if "CONTENT_LENGTH" in environ else 0
        if length < 0:
            return None
        keeps_alive = line.keeps_alive
        if "HTTP_CONNECTION" in environ:
            connection = environ["HTTP_CONNECTION"].lower()
            keeps_alive = connection == "keep-alive" or (keeps_alive and connection != "close")
        scheme = self._scheme(environ)
        environ.update(line.environ)
        read = _Head(environ, lines, line, length, keeps_alive, scheme)
        if not new and lines[0] in self._known_lines:
            _remember(self._known_heads, head, read)
        return read

    def _read_line(self, text: bytes) -> _Line | None:
        found = _LINE.fullmatch(text)
        if found is None:
            return None
        verb, path, query, minor = found.group(1, 2, 3, 4)
        line = _Line(
            {
                "REQUEST_METHOD": verb.decode("ascii"),
                "PATH_INFO": (unquote_to_bytes(path) if b"%" in path else path).decode("latin-1"),
                "QUERY_STRING": query[1:].decode("ascii") if query else "",
                "RAW_URI": (path + query if query else path).decode("ascii"),
                "SERVER_PROTOCOL": f"HTTP/1.{minor.decode()}",
            },
            verb.decode("ascii"),
            (1, int(minor)),
            minor == b"1",
        )
        if query is None:
            _remember(self._known_lines, text, line)
        return line

    def _read_fields(self, lines: list[bytes]) -> list[tuple[str, str]] | None:
        """What each of these lines means for an environ; None if one is not plain."""
        block = b"\r\n".join(lines)
        found = _Fields()
        try:
            httptools.HttpRequestParser(found).feed_data(b"GET / HTTP/1.1\r\n%b\r\n\r\n" % block)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        breaks = len(lines) - 1
        if (
            len(found) != len(lines)
            or block.count(b"\n") != breaks
            or block.count(b"\r") != breaks
            or len(block.translate(None, _CONTROLS)) != len(block)
        ):
            return None
        fields = []
        for line, (name, value) in zip(lines, found, strict=True):
            lower = name.lower()
            if _NAME.fullmatch(name) is None or lower in _UNUSUAL:
                return None
            key = name.decode("ascii").upper().replace("-", "_")
            if key not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
                key = "HTTP_" + key
            field = key, value.strip(b" \t").decode("latin-1")
            fields.append(field)
            if lower in _REMEMBERED:
                _remember(self._known_fields, line, field)
        return fields

    def _scheme(self, environ: Mapping[str, str]) -> bool | None:
        """Whether a proxy says that its client used TLS; None if its fields contradict each other."""
        said = None
        for key, secure in self._schemes:
            if key in environ:
                says = environ[key] == secure
                if said is not None and says is not said:
                    return None
                said = says
        return bool(said)


T = TypeVar("T")


def _remember(known: dict[bytes, T], text: bytes, meaning: T) -> None:
    if len(text) <= _MAX_KNOWN_BYTES:
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[text] = meaning


def _length(declared: str) -> int:
    plain = declared.isascii() and declared.isdigit() and len(declared) <= _MAX_DIGITS
    return int(declared) if plain else -1

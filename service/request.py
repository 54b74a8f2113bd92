"""The light request handlers see: a thin reading of the WSGI environ, with no framework and no context behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from service import body
from service.environ import ID_KEY
from service.errors import HttpError
from workers import strict_json

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment


class Request:
    """One request. The body is read on the first look at it, within the server's limits."""

    __slots__ = ("_match", "body_limit", "environ")

    def __init__(self, environ: WSGIEnvironment, body_limit: int, match: re.Match[str] | None = None) -> None:
        self.environ = environ
        self.body_limit = body_limit
        self._match = match

    @property
    def method(self) -> str:
        method: str = self.environ["REQUEST_METHOD"]
        return method

    @property
    def path(self) -> str:
        return decoded_path(self.environ)

    @property
    def id(self) -> str:
        request_id: str = self.environ.get(ID_KEY, "-")
        return request_id

    @property
    def headers(self) -> Mapping[str, str]:
        return RequestHeaders(self.environ)

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters by name; of a repeated one the first."""
        pairs = parse_qsl(self.environ.get("QUERY_STRING", ""), keep_blank_values=True)
        return dict(reversed(pairs))

    @property
    def body(self) -> bytes:
        """The body as it came."""
        return body.read(self.environ, self.body_limit)

    @property
    def plain_body(self) -> bytes:
        """The body for a handler that is to understand it: 415 when it is compressed."""
        body.refuse_encoded(self.environ)
        return self.body

    def json(self) -> object:
        """The body as strict JSON, else 400."""
        try:
            return strict_json.loads(self.plain_body)
        except strict_json.InvalidJSON:
            raise HttpError(400, "invalid json") from None

    def param(self, key: str | int) -> str:
        """What a capture of the route's pattern matched, by name or by position from 0."""
        if self._match is None:
            raise KeyError(f"the route of {self.path} is not a pattern")
        try:
            value: str | None = self._match.group(_group(key))
        except IndexError:
            raise KeyError(f"the pattern {self._match.re.pattern} has no capture {key!r}") from None
        return value or ""


def _group(key: str | int) -> str | int:
    if isinstance(key, str):
        return key
    if key < 0:
        raise IndexError(key)  # `re` would count from 0, the whole path
    return key + 1


class RequestHeaders(Mapping[str, str]):
    """Header fields by name, in any case, over the environ."""

    __slots__ = ("_environ",)

    def __init__(self, environ: WSGIEnvironment) -> None:
        self._environ = environ

    def __getitem__(self, name: str) -> str:
        key = name.upper().replace("-", "_")
        value: str = self._environ[key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else "HTTP_" + key]
        return value

    def __iter__(self) -> Iterator[str]:
        for key in self._environ:
            if key.startswith("HTTP_"):
                yield key[5:].replace("_", "-").title()
            elif key in ("CONTENT_TYPE", "CONTENT_LENGTH"):
                yield key.replace("_", "-").title()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.get(name) is not None


def decoded_path(environ: WSGIEnvironment) -> str:
    """The path as text. WSGI hands percent-decoded bytes over as latin-1; so `%2F` is a slash like any other."""
    raw: str = environ.get("PATH_INFO", "") or "/"
    return raw if raw.isascii() else raw.encode("latin-1").decode("utf-8", "replace")

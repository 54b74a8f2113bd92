"""What a handler returns: a status, headers and a body, owned by no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response as WerkzeugResponse
from werkzeug.wsgi import ClosingIterator

from service.sse import TOKENS, Form
from service.streams import EventStream, HandlerEvents, Start, heartbeat_s
from workers import strict_json
from workers.errors import InvalidOutput

if TYPE_CHECKING:
    from service.request import Request

Piece = bytes
Bytes = bytes | memoryview  # `Response.bytes` hides the name inside the class
Returned = object  # dict or list → JSON, str → text, bytes → octets, a Response (ours or werkzeug's) as it is

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"
OCTETS_TYPE = "application/octet-stream"
_COMPLETED = frozenset({"content-length", "location", "content-location"})
STREAM_HEADERS = (
    ("Content-Type", "text/event-stream"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
)


class Response:
    """`body` is either all of it or an iterable of pieces; an iterable with `close` is closed at the end. A contiguous
    memoryview is sent from where it lies, on a server that can."""

    __slots__ = ("_fields", "_headers", "body", "status")

    def __init__(
        self, body: Bytes | Iterable[Piece] = b"", status: int = 200, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.body = body
        self.status = status
        self._headers: Headers | None
        self._fields: tuple[tuple[str, str], ...] = ()
        self._headers = Headers(headers) if headers else None

    @property
    def headers(self) -> Headers:
        if self._headers is None:  # most answers go out without anybody having looked
            self._headers = Headers(self._fields)
        return self._headers

    @headers.setter
    def headers(self, headers: Headers) -> None:
        self._headers = headers

    @property
    def header_list(self) -> Iterable[tuple[str, str]]:
        return self._fields if self._headers is None else self._headers.to_wsgi_list()

    @property
    def is_simple(self) -> bool:
        """Whether it goes out as it is: nothing in it that werkzeug would add to, or take away."""
        if self.status < 200 or self.status in (204, 304):
            return False
        return self._headers is None or not any(name.lower() in _COMPLETED for name, _ in self._headers)

    @classmethod
    def json(cls, obj: object, status: int = 200) -> Response:
        try:
            body = strict_json.dumps(obj)
        except ValueError:
            raise InvalidOutput("the answer holds NaN, Infinity or half a surrogate: JSON has no form for it") from None
        return cls._typed(body, status, JSON_TYPE)

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        return cls._typed(text.encode(), status, TEXT_TYPE)

    @classmethod
    def bytes(cls, body: Bytes, content_type: str = OCTETS_TYPE, status: int = 200) -> Response:
        return cls._typed(body, status, content_type)

    @classmethod
    def _typed(cls, body: Bytes, status: int, content_type: str) -> Response:
        """With no more than a type, as most are: nobody may ever look at its headers."""
        if not content_type.isprintable():  # an error of those who make such headers
            return cls(body, status, [("Content-Type", content_type)])
        response = cls(body, status)
        response._fields = (("Content-Type", content_type),)
        return response

    @classmethod
    def sse(cls, events: Iterable[Mapping[str, object]]) -> Response:
        """A stream of server-sent events with the keys `event`, `data`, `id`, `retry`; a `str` of data goes raw,
        anything else as JSON."""
        return cls(HandlerEvents(events), 200, STREAM_HEADERS)

    @classmethod
    def stream(cls, request: Request, start: Start, form: Form = TOKENS) -> Response:
        """The pieces of a task as server-sent events, each as it comes: `start(caller)` begins it, with `caller` for
        the `stream` of the pool's client, and is not called for a HEAD. Waits for the first piece, so that a failure
        before it is raised here and has a status of its own; a later one is the stream's last event."""
        if request.method == "HEAD":
            return cls(iter(()), 200, STREAM_HEADERS)
        return cls(EventStream(form, heartbeat_s()).begin(start, request.environ), 200, STREAM_HEADERS)


def to_response(returned: Returned) -> Response:
    """The response a handler meant by what it returned."""
    if isinstance(returned, Response):
        return returned
    if isinstance(returned, (dict, list)):
        return Response.json(returned)
    if isinstance(returned, str):
        return Response.text(returned)
    if isinstance(returned, (bytes, memoryview)):
        return Response.bytes(returned)
    if isinstance(returned, WerkzeugResponse):
        if not returned.is_streamed:
            return Response(returned.get_data(), returned.status_code, returned.headers)
        pieces = ClosingIterator(returned.iter_encoded(), returned.close)
        return Response(pieces, returned.status_code, returned.headers)
    raise TypeError(f"a handler returned {type(returned).__name__}: not a dict, list, str, bytes or Response")

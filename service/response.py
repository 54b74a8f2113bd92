"""What a handler returns: a status, headers and a body, owned by no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from werkzeug.datastructures import Headers
from werkzeug.wrappers import Response as WerkzeugResponse
from werkzeug.wsgi import ClosingIterator

from service import sse as events_of
from workers import strict_json
from workers.errors import InvalidOutput

Bytes = bytes  # `Response.bytes` hides the name inside the class
Returned = object  # dict or list → JSON, str → text, bytes → octets, a Response (ours or werkzeug's) as it is

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"
OCTETS_TYPE = "application/octet-stream"
STREAM_HEADERS = (
    ("Content-Type", "text/event-stream"),
    ("Cache-Control", "no-cache"),
    ("X-Accel-Buffering", "no"),
)


class Response:
    """`body` is either all of it or an iterable of pieces; an iterable with `close` is closed at the end."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self, body: Bytes | Iterable[Bytes] = b"", status: int = 200, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.body = body
        self.status = status
        self.headers = Headers(headers)

    @classmethod
    def json(cls, obj: object, status: int = 200) -> Response:
        try:
            body = strict_json.dumps(obj)
        except ValueError:
            raise InvalidOutput("the answer holds NaN, Infinity or half a surrogate: JSON has no form for it") from None
        return cls(body, status, [("Content-Type", JSON_TYPE)])

    @classmethod
    def text(cls, text: str, status: int = 200) -> Response:
        return cls(text.encode(), status, [("Content-Type", TEXT_TYPE)])

    @classmethod
    def bytes(cls, body: Bytes, content_type: str = OCTETS_TYPE, status: int = 200) -> Response:
        return cls(body, status, [("Content-Type", content_type)])

    @classmethod
    def sse(cls, events: Iterable[Mapping[str, object]]) -> Response:
        """A stream of server-sent events with the keys `event`, `data`, `id`, `retry`; a `str` of data goes raw,
        anything else as JSON."""
        return cls(events_of.frames(events), 200, STREAM_HEADERS)


def to_response(returned: Returned) -> Response:
    """The response a handler meant by what it returned."""
    if isinstance(returned, Response):
        return returned
    if isinstance(returned, (dict, list)):
        return Response.json(returned)
    if isinstance(returned, str):
        return Response.text(returned)
    if isinstance(returned, bytes):
        return Response.bytes(returned)
    if isinstance(returned, WerkzeugResponse):
        if not returned.is_streamed:
            return Response(returned.get_data(), returned.status_code, returned.headers)
        pieces = ClosingIterator(returned.iter_encoded(), returned.close)
        return Response(pieces, returned.status_code, returned.headers)
    raise TypeError(f"a handler returned {type(returned).__name__}: not a dict, list, str, bytes or Response")

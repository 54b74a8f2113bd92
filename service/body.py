"""Reading a request's body: whole or not at all, within the limit, never handed on when its client went away.

How long a client may take is the server's business (`service.webworker` bounds each wait for bytes and raises
`TimeoutError`). A body that was not read to its end leaves the connection in the middle of a message, so every
refusal here asks for it to be closed, by `CLOSE_KEY` in the environ: PEP 3333 gives applications no other word.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from gunicorn.http.errors import ParseException

from service.connection import TURN_S
from service.environ import BODY_KEY, CLOSE_KEY, WHOLE_KEY
from service.errors import HttpError
from workers.errors import TooLarge

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment


_STEP = 1024 * 1024


class _Input(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read(environ: WSGIEnvironment, limit: int) -> bytes:
    """All of the body, to whoever asks and as often: 413 over the limit, declared or chunked; 400 when it is malformed
    or ends too soon; 408 when it comes too slowly."""
    if WHOLE_KEY in environ:
        stream, length, whole = environ[WHOLE_KEY]
        # Unless somebody in between has put another body, or another length, in its place.
        if stream is environ["wsgi.input"] and length == environ.get("CONTENT_LENGTH") and len(whole) <= limit:
            return cast(bytes, whole)
    if BODY_KEY not in environ:
        try:
            environ[BODY_KEY] = _read(environ, limit)
        except (HttpError, TooLarge) as error:
            environ[BODY_KEY] = error
    body = environ[BODY_KEY]
    if isinstance(body, Exception):
        raise body
    return cast(bytes, body)


def refuse_encoded(environ: WSGIEnvironment) -> None:
    """415 for whoever is to understand the body, when it is compressed."""
    if "HTTP_CONTENT_ENCODING" not in environ:
        return
    encoding = environ["HTTP_CONTENT_ENCODING"].strip().lower()
    if encoding not in ("", "identity"):
        _refuse(environ, 415, f"Content-Encoding {encoding!r} is not supported", [("Accept-Encoding", "identity")])


def _read(environ: WSGIEnvironment, limit: int) -> bytes:
    declared = _declared(environ)
    if declared is None and "chunked" not in environ.get("HTTP_TRANSFER_ENCODING", "").lower():
        return b""
    if declared is not None and declared > limit:
        raise _too_large(environ, limit)
    try:
        # One byte more than allowed is asked for, so that a body over the limit is told from one that fills it.
        body = _read_up_to(environ["wsgi.input"], limit + 1 if declared is None else declared)
    except TimeoutError:
        _refuse(environ, 408, "the body came too slowly")
    except ParseException:
        _refuse(environ, 400, "malformed chunked body")
    except OSError:
        _refuse(environ, 400, "the body ended too soon")
    if len(body) > limit:
        raise _too_large(environ, limit)
    if declared is not None and len(body) < declared:
        _refuse(environ, 400, "the body ended too soon")
    return body


def _declared(environ: WSGIEnvironment) -> int | None:
    text = environ.get("CONTENT_LENGTH", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        _refuse(environ, 400, "malformed Content-Length")
    return int(text)


def _read_up_to(stream: _Input, size: int) -> bytes:
    piece = stream.read(min(size, _STEP)) if size else b""
    if not piece or len(piece) == size:
        return piece
    missing = size
    body = io.BytesIO()  # grown in place and given away as it is: to join the pieces of a large body takes long
    while piece:
        body.write(piece)
        missing -= len(piece)
        if not missing:
            break
        time.sleep(TURN_S)  # a fast sender never makes a read wait; the other requests want their turn too
        piece = stream.read(min(missing, _STEP))
    return body.getvalue()


def _too_large(environ: WSGIEnvironment, limit: int) -> TooLarge:
    environ[CLOSE_KEY] = True
    return TooLarge(f"the body is larger than {limit} bytes")


def _refuse(
    environ: WSGIEnvironment, status: int, reason: str, headers: list[tuple[str, str]] | None = None
) -> NoReturn:
    environ[CLOSE_KEY] = True
    raise HttpError(status, reason, headers or ())

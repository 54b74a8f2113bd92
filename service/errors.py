"""How a failure is answered: the one table from code names to statuses, and the JSON envelope of Headrace's own
routes. Other protocols keep the table and bring their own envelope.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from http import HTTPStatus

from gunicorn.http.errors import ParseException
from werkzeug.exceptions import HTTPException, InternalServerError, MethodNotAllowed

from service.response import Response
from service.streams import TooManyStreams
from workers.errors import InvalidInput, Overloaded, PoolError

logger = logging.getLogger("headrace")

STATUS = {
    "INVALID_INPUT": 400,
    "MODEL_NOT_FOUND": 404,
    "TOO_LARGE": 413,
    "INVALID_OUTPUT": 422,
    "OVERLOADED": 429,
    "CANCELLED": 499,  # nobody is there to read it: what the log calls a client that left
    "MODEL_FAILED": 500,
    "WORKER_DIED": 500,
    "NOT_READY": 503,
    "DRAINING": 503,
    "POOL_LOST": 503,
    "DEADLINE_EXCEEDED": 504,
}
REFUSED = 403  # any other code is a model's own refusal


class HttpError(Exception):
    """A failure of the request itself, before any model is concerned."""

    def __init__(self, status: int, reason: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(reason)
        self.status = status
        self.headers = headers


def status_of(error: PoolError) -> int:
    return 503 if isinstance(error, TooManyStreams) else STATUS.get(error.code, REFUSED)


def failure(error: Exception, request_id: str) -> Response:
    """The answer to a request that ended in `error`. Whatever is not foreseen is 500, and only the log says more."""
    if isinstance(error, PoolError):
        return _pool_failure(error)
    if isinstance(error, HttpError):
        return _envelope(error.status, str(error), headers=error.headers)
    if isinstance(error, InternalServerError) or not isinstance(error, (HTTPException, ParseException)):
        cause = getattr(error, "original_exception", None) or error
        logger.error("request %s failed", request_id, exc_info=cause)
        return _envelope(500, "internal error")
    if isinstance(error, ParseException):  # met by a handler that reads `wsgi.input` itself
        return _envelope(400, "malformed body")
    return _http_failure(error)


def _pool_failure(error: PoolError) -> Response:
    headers = [("Retry-After", str(error.retry_after))] if isinstance(error, Overloaded) else []
    # Clients rely on the bare reason here: the status says all the code would.
    code = "" if isinstance(error, InvalidInput) else error.code
    return _envelope(status_of(error), str(error), code, headers)


def _http_failure(error: HTTPException) -> Response:
    """What werkzeug or a Flask view raised, with its headers (`Allow`, `Retry-After`, …) and without its HTML."""
    status = error.code or 500
    if isinstance(error, MethodNotAllowed):
        allow = ", ".join(sorted(error.valid_methods or ()))
        return _envelope(status, "method not allowed", headers=[("Allow", allow)])
    given = error.description if error.description != type(error).description else None
    headers = [(name, value) for name, value in error.get_headers() if name.lower() != "content-type"]
    return _envelope(status, given or phrase(status).lower(), headers=headers)


def _envelope(status: int, reason: str, code: str = "", headers: Sequence[tuple[str, str]] = ()) -> Response:
    reason = reason.encode("utf-8", "replace").decode()  # a model's own text may hold anything
    body = {"error": reason, "code": code} if code else {"error": reason}
    response = Response.json(body, status=status)
    response.headers.extend(headers)
    return response


@functools.lru_cache(1024)
def status_line(status: int) -> str:
    return f"{status} {phrase(status)}"


def phrase(status: int) -> str:
    """The reason phrase of a status line."""
    if status == 499:
        return "Client Closed Request"
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"

"""Two small helpers for scripts and tests: fetch or post, get the text, fail loudly."""

from __future__ import annotations

from http import HTTPStatus
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

_TIMEOUT_S = 60.0


class StatusError(Exception):
    """An answer of status 400 or above: `400 Bad Request on POST /score`."""

    def __init__(self, status: int, method: str, url: str, body: str) -> None:
        try:
            phrase = f" {HTTPStatus(status).phrase}"
        except ValueError:
            phrase = ""
        super().__init__(f"{status}{phrase} on {method} {urlsplit(url).path or '/'}")
        self.status = status
        self.body = body


def get_text(url: str) -> str:
    return _fetch("GET", url, None)


def post_text(url: str, body: str | bytes) -> str:
    return _fetch("POST", url, body.encode() if isinstance(body, str) else body)


def _fetch(method: str, url: str, body: bytes | None) -> str:
    # A type is given because urllib would otherwise call every body a form.
    headers = {} if body is None else {"Content-Type": "application/octet-stream"}
    try:
        with urlopen(Request(url, body, headers, method=method), timeout=_TIMEOUT_S) as answer:
            text: str = answer.read().decode("utf-8", "replace")
            return text
    except HTTPError as error:
        with error:
            raise StatusError(error.code, method, url, error.read().decode("utf-8", "replace")) from None

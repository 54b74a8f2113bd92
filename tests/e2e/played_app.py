"""The application of the tests with real clients: that of the other tests, streams that a test plays, and two pages.

`GET /played?script=N` streams a script as tokens (`/flask/played` does so through Flask), `/quoted` as JSON strings.
`/numbered` gives its events ids and goes on where a client has left off; it answers 204 to a client that has had all.
`/page` can listen to any of them; `/elsewhere` is where a user goes next.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from service import Request, Response
from service.sse import TOKENS, Form
from tests.e2e.apps import pool, server
from tests.e2e.playing import FAREWELL, MODEL, RETRY_MS
from workers import strict_json

__all__ = ["server"]

PAGE = (Path(__file__).parent / "page.html").read_bytes()
HTML = "text/html; charset=utf-8"
OVER = "over"  # the id of an event that none follows

QUOTED = Form(lambda text: b"data: %b\n\n" % strict_json.dumps(text))


def numbered(begin: int) -> Form:
    had = begin

    def piece(text: str) -> Mapping[str, object]:
        nonlocal had
        had += 1
        return {"event": "token", "data": text, "id": OVER if text == FAREWELL else had, "retry": RETRY_MS}

    return Form(piece)


def play(request: Request, form: Form, begin: int = 0) -> Response:
    inputs = {"script": np.array([int(request.query["script"])]), "begin": np.array([begin])}
    return Response.stream(request, lambda caller: pool.stream(MODEL, inputs, caller=caller), form)


def as_tokens(request: Request) -> Response:
    return play(request, TOKENS)


server.get("/played", as_tokens)
server.route("GET", "/flask/played", as_tokens, pattern=True)


@server.get("/quoted")
def as_strings(request: Request) -> Response:
    return play(request, QUOTED)


@server.get("/numbered")
def resumable(request: Request) -> Response:
    last = request.headers.get("Last-Event-ID", "0")
    if last == OVER:
        return Response(status=204)
    return play(request, numbered(int(last)), int(last))


@server.get("/page")
def page(_: Request) -> Response:
    return Response.bytes(PAGE, HTML)


@server.get("/elsewhere")
def elsewhere(_: Request) -> Response:
    return Response.bytes(b"<!doctype html><title>elsewhere</title>", HTML)

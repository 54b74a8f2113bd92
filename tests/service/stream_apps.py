"""An application whose streams the test plays over HTTP, one line of control for each step; it needs no pool.

`GET /play?name=N` opens the stream N (`/flask/play` goes through Flask, `/generator` has events that a handler makes).
`POST /say?name=N` lets it say the body, one piece a line as JSON; `/end` ends it; `/state` tells what has become of it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from service import HttpServer, Request, Response, create_app
from service.environ import WATCH_KEY
from service.open_streams import streams
from service.sse import TOKENS, Form
from tests.service.stub import StubClient, StubStream, status
from workers.errors import ModelFailed, WorkerDied

CONTRACT = [b"Tensors ", b"stream ", b"one ", b"by ", b"one."]

client = StubClient(status("tokens"))
client.pieces = CONTRACT
server: HttpServer = create_app(client)
played: dict[str, StubStream] = {}
sources: dict[str, list[str]] = {}


def numbered() -> Form:
    """Events with ids, and the end that some protocols have."""
    count = 0

    def piece(text: str) -> Mapping[str, object]:
        nonlocal count
        count += 1
        if text == "bad":
            raise ZeroDivisionError
        return {"data": text, "id": count, "retry": 250}

    return Form(piece, b"data: [DONE]\n\n")


@server.use
def replacing(request: Request, following: Callable[[Request], Response]) -> Response:
    """Answers itself, when it is told to, though a stream has begun."""
    response = following(request)
    return Response.text("replaced") if "replaced" in request.query else response


FORMS = {"tokens": lambda: TOKENS, "numbered": numbered}


def _play(request: Request) -> Response:
    form = FORMS[request.query.get("form", "tokens")]()

    def start(caller: socket.socket | None) -> StubStream:
        name = request.query["name"]
        if name == "refused":
            raise ModelFailed("no")
        played[name] = stream = StubStream()
        sources[name] = [
            "watched" if request.environ.get(WATCH_KEY) else "not watched",
            "caller" if caller is not None else "no caller",
            request.headers.get("Last-Event-ID", "-"),
        ]
        if "say" in request.query:
            stream.say(*(piece.encode() for piece in json.loads(request.query["say"])))
        if "end" in request.query:
            stream.end(_failure(request))
        return stream

    return Response.stream(request, start, form)


server.get("/play", _play)
server.route("GET", r"/flask/play", _play, pattern=True)  # patterns go through Flask


@server.get("/generator")
def generator(request: Request) -> Response:
    played[request.query["name"]] = stream = StubStream()

    def events() -> Iterator[dict[str, Any]]:
        try:
            for piece in stream:
                yield {"data": piece.decode()}
        finally:
            stream.close()

    return Response.sse(events())


@server.post("/say")
def say(request: Request) -> str:
    stream = played[request.query["name"]]
    pieces = [json.loads(line).encode("latin-1") for line in request.body.splitlines()]
    if "broken" in request.query:  # the first of them gets lost on its way
        take = stream.take

        def broken() -> list[bytes]:
            stream.take = take  # type: ignore[method-assign]
            return [][len(take())]

        stream.take = broken  # type: ignore[method-assign]
        for piece in pieces:
            stream.say(piece)
    else:
        stream.say(*pieces)
    return "said"


@server.post("/many")
def many(request: Request) -> str:
    """The same piece to every stream that is played."""
    for stream in played.values():
        stream.say(request.body)
    return "said"


@server.post("/end")
def end(request: Request) -> str:
    played[request.query["name"]].end(_failure(request))
    return "ended"


def _failure(request: Request) -> WorkerDied | None:
    return WorkerDied(request.query["cut"]) if "cut" in request.query else None


@server.get("/state")
def state(request: Request) -> dict[str, object]:
    stream = played.get(request.query["name"])
    if stream is None:
        return {"open": len(streams)}
    return {
        "taken": stream.taken,
        "granted": stream.granted,
        "closed": stream.closed,
        "direct": stream._heard is not None,
        "begun": sources.get(request.query["name"]),
        "open": len(streams),
        "threads": threading.active_count(),
    }


@server.get("/streams")
def open_streams(request: Request) -> dict[str, int]:
    return {
        "open": len(streams),
        "limit": streams.limit,
        "begun": len(played),
        "tasks": len(client.streams),
        "pid": os.getpid(),
    }

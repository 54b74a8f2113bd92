"""An application for tests under real gunicorn; it needs no pool."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import flask
import gevent

from service import HttpServer, Request, Response
from service.routing import Next

server = HttpServer()


@server.use
def guard(request: Request, following: Next) -> Response:
    """As an application would keep a path to itself."""
    return Response.text("no", status=403) if request.path.startswith("/guarded") else following(request)


@server.get("/guarded")
def guarded(request: Request) -> str:
    return "secret"


@server.route("/guarded/flask")
def guarded_view() -> str:
    return "secret"


@server.post("/echo")
def echo(request: Request) -> bytes:
    return request.body


@server.route("/flask/echo", methods=["POST"])
def flask_echo() -> bytes:
    return flask.request.get_data()


@server.post("/unread")
def unread(request: Request) -> str:
    return "unread"


@server.get("/pid")
def pid(request: Request) -> dict[str, int]:
    return {"pid": os.getpid()}


@server.get("/slow")
def slow(request: Request) -> str:
    time.sleep(float(request.query["s"]))
    return "slow"


@server.get("/large")
def large(request: Request) -> bytes:
    return b"x" * int(request.query["n"])


RAISED: dict[str, BaseException] = {
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
    "timeout": gevent.Timeout(1),
    "file": FileNotFoundError(2, "No such file or directory"),
    "reset": ConnectionResetError(104, "Connection reset by peer"),
    "slow": TimeoutError(),
}


@server.get("/raises")
def raises(request: Request) -> str:
    raise RAISED[request.query["what"]]


@server.get("/raises-late")
def raises_late(request: Request) -> Response:
    def pieces() -> Iterator[bytes]:
        raise RAISED[request.query["what"]]
        yield b"never"

    return Response(pieces())


@server.get("/bad-header")
def bad_header(request: Request) -> Response:
    return Response(b"", headers=[("Bad name", "value")])


@server.post("/late")
def late(request: Request) -> bytes:
    time.sleep(float(request.query["s"]))
    return request.body


@server.get("/stream")
def stream(request: Request) -> Response:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        yield b"second"

    return Response(pieces())


@server.get("/breaks")
def breaks(request: Request) -> Response:
    def pieces() -> Iterator[bytes]:
        yield b"first"
        raise ZeroDivisionError

    return Response(pieces())

"""A WSGI application that knows nothing of ours, beside light handlers, for what the lean way gives to both."""

from __future__ import annotations

import gc
import io
import json
import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl

from service import HttpServer, Request, Response
from workers.arena import reserve

Environ = dict[str, Any]

LARGE = 20 * 1024 * 1024
PATTERN = bytes(range(256)) * (LARGE // 256)

# Pieces of an answer, by name.
VIEWS: dict[str, list[memoryview]] = {
    "small": [memoryview(b"0123456789")],
    "large": [memoryview(PATTERN)],
    "floats": [memoryview(PATTERN[:40_000]).cast("f")],
    "two dimensions": [memoryview(PATTERN[:4096]).cast("I", [32, 32])],
    "empty": [memoryview(b"")],
    "none of 3": [memoryview(b"012345").cast("B", [2, 3])[:0]],
    "slices": [memoryview(PATTERN)[7:100_007], memoryview(b""), memoryview(PATTERN)[3:5]],
    "every other": [memoryview(PATTERN)[:1000:2]],
    "writable": [memoryview(bytearray(PATTERN[:70_000]))],
}


def application(environ: Environ, start_response: Any) -> Iterable[Any]:
    route = ROUTES.get(environ["PATH_INFO"])
    return server(environ, start_response) if route is None else route(environ, start_response)


def _query(environ: Environ) -> dict[str, str]:
    return dict(parse_qsl(environ["QUERY_STRING"]))


def _answer(start_response: Any, *pieces: Any, length: int | None) -> Iterable[Any]:
    start_response("200 OK", [] if length is None else [("Content-Length", str(length))])
    return pieces


def _said(start_response: Any, told: object) -> Iterable[Any]:
    body = json.dumps(told).encode()
    return _answer(start_response, body, length=len(body))


def steps(environ: Environ, start_response: Any) -> Iterable[Any]:
    """The body, read by steps as `into5 read3 line into100`; what each has got, or the name of what it raised."""
    got = []
    for step in _query(environ)["steps"].split():
        kind, size = step[:4], int(step[4:] or 100)
        stream = environ["wsgi.input"]
        try:
            if kind == "into":
                slot = bytearray(size)
                got.append(bytes(slot[: stream.readinto(slot)]).decode())
            else:
                got.append({"read": stream.read, "line": stream.readline}[kind](size).decode())
        except Exception as error:
            got.append(type(error).__name__)
            break
    return _said(start_response, got)


def slot(environ: Environ, start_response: Any) -> Iterable[Any]:
    """The body, read into shared memory and sent from it."""
    length = int(environ["CONTENT_LENGTH"])
    fd = reserve("test", length)
    memory = mmap.mmap(fd, length)
    os.close(fd)
    view, done = memoryview(memory), 0
    while done < length:
        size = environ["wsgi.input"].readinto(view[done:])
        if not size:
            break
        done += size
    return _answer(start_response, view[:done], length=done)


def views(environ: Environ, start_response: Any) -> Iterable[Any]:
    pieces = VIEWS[_query(environ)["kind"]]
    length = sum(piece.nbytes for piece in pieces) if "length" in _query(environ) else None
    return _answer(start_response, *pieces, length=length)


def way(environ: Environ, start_response: Any) -> Iterable[Any]:
    """gunicorn's own input cannot read into memory of others."""
    lean = hasattr(environ["wsgi.input"], "readinto")
    return _said(start_response, ["lean" if lean else "gunicorn", environ["wsgi.input"].read().decode()])


def settle(environ: Environ, start_response: Any) -> Iterable[Any]:
    """From now on nothing is collected but by this; how many objects it has found that nothing else would free."""
    found = gc.collect()
    gc.disable()
    return _said(start_response, found)


def upper(environ: Environ, start_response: Any) -> Iterable[Any]:
    """A middleware with another body for the application, of the same length."""
    body = environ["wsgi.input"].read().upper()
    environ["PATH_INFO"] = "/light/echo"
    return server({**environ, "wsgi.input": io.BytesIO(body)}, start_response)


def longer(environ: Environ, start_response: Any) -> Iterable[Any]:
    """A middleware that takes off the end of the body."""
    environ["PATH_INFO"] = "/light/echo"
    return server({**environ, "CONTENT_LENGTH": "2"}, start_response)


def shouting(environ: Environ, start_response: Any) -> Iterable[Any]:
    """A middleware that has a `start_response` of its own, and pieces of `bytes` to change."""
    environ["PATH_INFO"] = "/light/view"
    return [piece.upper() for piece in server(environ, lambda *begun: start_response(*begun))]


def errors(environ: Environ, start_response: Any) -> Iterable[Any]:
    environ["wsgi.errors"].write(_query(environ)["line"] + "\n")
    return _said(start_response, "written")


def hints(environ: Environ, start_response: Any) -> Iterable[Any]:
    """Early hints without end."""
    try:
        while True:
            environ["wsgi.early_hints"]([("Link", "x" * 8000)])
    except Exception as error:
        environ["wsgi.errors"].write(f"hints: {type(error).__name__}\n")
        raise


def stubborn(environ: Environ, start_response: Any) -> Iterable[Any]:
    """Goes on when its client has been given up."""
    write = start_response("200 OK", [])
    failures = 0
    for piece in (*[PATTERN] * 3, b"tail"):
        try:
            write(piece)
        except Exception:
            failures += 1
    environ["wsgi.errors"].write(f"stubborn: {failures} failed\n")
    return ()


ROUTES: dict[str, Callable[[Environ, Any], Iterable[Any]]] = {
    "/steps": steps,
    "/slot": slot,
    "/views": views,
    "/way": way,
    "/settle": settle,
    "/upper": upper,
    "/longer": longer,
    "/shouting": shouting,
    "/errors": errors,
    "/hints": hints,
    "/stubborn": stubborn,
}

server = HttpServer()


@server.get("/light")
def light(request: Request) -> dict[str, str]:
    return {"hello": request.query.get("name", "world")}


@server.post("/light/echo")
def echo(request: Request) -> bytes:
    return request.body


@server.get("/light/big")
def big(_: Request) -> bytes:
    return PATTERN[:60_000]


@server.get("/light/view")
def light_view(request: Request) -> memoryview:
    (piece,) = VIEWS[request.query["kind"]]
    return piece


@server.get("/light/views")
def light_views(request: Request) -> Response:
    return Response(iter(VIEWS[request.query["kind"]]))  # type: ignore[arg-type]


@server.get("/light/stream")
def stream(request: Request) -> Response:
    return Response.sse({"data": number} for number in range(3))

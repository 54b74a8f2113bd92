"""The same `HttpServer` twice: `express`, and `by_flask`, whose hook sends every request through Flask."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import flask
from werkzeug.wsgi import wrap_file

from service import HttpServer, Request, Response
from service.errors import HttpError
from service.routing import Handler
from service.server import Blueprint
from service.sse import TOKENS, Form
from tests.equality.plain import dump
from tests.service.stub import StubStream
from workers import errors

BIG = bytes(range(256)) * 1024
POOL_ERRORS = {
    "invalid": errors.InvalidInput("no good"),
    "unknown": errors.ModelNotFound("no such model"),
    "overloaded": errors.Overloaded("too much"),
    "died": errors.WorkerDied("dead"),
    "failed": errors.ModelFailed("failed: é"),
    "deadline": errors.DeadlineExceeded("too late"),
}


def declare(server: HttpServer) -> HttpServer:
    _plain_answers(server)
    _bodies(server)
    _failures(server)
    _streams(server)
    _odd_answers(server)
    _flask_views(server)
    return server


def _plain_answers(server: HttpServer) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "PURGE", "TRACE", "CONNECT"):
        server.route(method, "/environ", lambda request: Response.bytes(dump(request.environ), "application/json"))
    server.get("/sentinel", lambda request: "sentinel")
    server.get("/", lambda request: "root")
    server.get("/text", lambda request: "text: é")
    server.get("/json", lambda request: {"b": [1, 2.5, None, True], "a": "é"})
    server.get("/bytes", lambda request: BIG[:300])
    server.get("/big", lambda request: BIG)
    server.get("/path", lambda request: {"path": request.path, "query": request.query})
    server.get("/headers", lambda request: dict(sorted(request.headers.items())))
    server.get("/é", lambda request: "umlaut")
    server.get("/a b", lambda request: "space")
    server.get("/dotted.name", lambda request: "dotted")
    server.get("/slash/", lambda request: "slash")
    server.route("HEAD", "/own-head", lambda request: Response(b"", 200, [("X-Head", "own")]))
    server.get("/own-head", lambda request: "got")
    server.route("OPTIONS", "/own-options", lambda request: "options")
    server.group("/group").get("/inner", lambda request: "inner")
    blueprint = Blueprint("equal", __name__, url_prefix="/blueprint")
    blueprint.get("/inner", lambda request: "blue")
    server.register_blueprint(blueprint)
    server.route("GET", r"/pattern/(?P<name>[^/]+)", lambda request: {"name": request.param("name")}, pattern=True)


def _bodies(server: HttpServer) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "PURGE"):
        server.route(method, "/echo", lambda request: request.body)
    server.post("/json", lambda request: {"json": request.json()})
    server.post("/unread", lambda request: "unread")
    server.get("/body", lambda request: request.body)
    server.post("/twice", lambda request: request.body + request.body)
    server.post("/stream", lambda request: Response(iter([request.body[:3], request.body[3:]])))


def _failures(server: HttpServer) -> None:
    @server.get("/http-error")
    def http_error(request: Request) -> None:
        raise HttpError(409, "conflict: é", [("Retry-After", "7")])

    @server.get("/value-error")
    def value_error(request: Request) -> None:
        raise ValueError("a bug")

    @server.get("/pool-error")
    def pool_error(request: Request) -> None:
        raise POOL_ERRORS[request.query["kind"]]

    @server.get("/abort")
    def abort(request: Request) -> None:
        flask.abort(int(request.query.get("status", "418")))

    server.get("/no-response", lambda request: 5)
    server.get("/nan", lambda request: {"nan": float("nan")})
    server.get("/bad-header", lambda request: Response(b"", headers=[("Bad name", "x")]))
    server.get("/bad-value", lambda request: Response(b"", headers=[("X-Bad", "ł")]))


def _streams(server: HttpServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"one"
        yield b""
        yield b"two"

    def breaks(at: int) -> Iterator[bytes]:
        for number in range(at):
            yield b"%d" % number
        raise ValueError("a bug")

    def failing() -> Iterator[dict[str, object]]:
        yield {"data": "one"}
        raise errors.WorkerDied("dead")

    server.get("/stream", lambda request: Response(pieces(), headers=[("Content-Type", "text/plain")]))
    server.get("/list", lambda request: Response([b"one", b"two"]))
    server.get("/empty-list", lambda request: Response([]))
    server.get("/breaks-first", lambda request: Response(breaks(0)))
    server.get("/breaks-later", lambda request: Response(breaks(2)))
    server.get("/sse", lambda request: Response.sse([{"data": "a\nb", "id": "1"}, {"event": "e", "data": {"x": 1}}]))
    server.get("/sse-fails", lambda request: Response.sse(failing()))

    def tokens(*said: bytes, cut: errors.PoolError | None = None, form: Form = TOKENS) -> Handler:
        def handler(request: Request) -> Response:
            stream = StubStream()
            stream.say(*said)
            stream.end(cut)
            return Response.stream(request, lambda caller: stream, form)

        return handler

    server.get("/tokens", tokens(b"a ", b"\xf0\x9f", b"\x98\x80", b"b\r\nc", b"", b"\xe2\x82"))
    server.get("/tokens-none", tokens())
    server.get("/tokens-cut", tokens(b"a", cut=errors.WorkerDied("dead")))
    server.get("/tokens-failed", tokens(cut=errors.Overloaded("too much")))
    server.get(
        "/tokens-numbered", tokens(b"a", b"b", form=Form(lambda text: {"id": 1, "data": [text]}, b"data: [DONE]\n\n"))
    )
    server.get("/stream-length", lambda request: Response(pieces(), headers=[("Content-Length", "6")]))
    server.get("/stream-204", lambda request: Response(pieces(), 204))


def _odd_answers(server: HttpServer) -> None:
    def answers(path: str, body: bytes, status: int, *headers: tuple[str, str]) -> None:
        server.get(path, lambda request: Response(body, status, headers))

    answers("/empty", b"", 204)
    answers("/empty-with-body", b"body", 204)
    answers("/not-modified", b"", 304, ("ETag", '"a"'))
    answers("/own-headers", b"x", 200, ("X-A", "1"), ("x-a", "2"), ("Set-Cookie", "a=b"), ("Set-Cookie", "c=d"))
    answers("/own-length", b"12345", 200, ("Content-Length", "5"))
    answers("/own-short-length", b"12345", 200, ("Content-Length", "3"))
    answers("/close", b"bye", 200, ("Connection", "close"))
    answers("/hop", b"x", 200, ("Keep-Alive", "timeout=5"), ("Transfer-Encoding", "chunked"), ("TE", "x"))
    answers("/date", b"x", 200, ("Date", "today"), ("Server", "mine"))
    answers("/spaces", b"x", 200, ("X-A", "  a b\t"), ("X-Empty", ""), ("X-Latin", "é"))
    answers("/own-id", b"x", 200, ("X-Request-ID", "mine"))
    answers("/499", b"x", 499)
    answers("/299", b"x", 299)
    answers("/created", b"x", 201, ("Location", "/x"))
    server.get("/werkzeug", lambda request: flask.Response("w", 202, {"X-W": "1"}))
    server.get("/werkzeug-stream", lambda request: flask.Response(iter(["w", "v"]), content_type="text/x"))


def _flask_views(server: HttpServer) -> None:
    @server.route("/flask/text")
    def text() -> str:
        return "text: é"

    @server.route("/flask/json")
    def as_json() -> flask.Response:
        return flask.jsonify({"b": 1, "a": [None]})

    @server.route("/flask/environ", methods=["GET", "POST", "PUT"])
    def environ() -> flask.Response:
        return flask.Response(dump(flask.request.environ), content_type="application/json")

    @server.route("/flask/echo", methods=["POST"])
    def echo() -> bytes:
        return flask.request.get_data()

    @server.route("/flask/form", methods=["POST"])
    def form() -> str:
        return json.dumps([list(flask.request.form.items()), list(flask.request.args.items(multi=True))])

    @server.route("/flask/stream")
    def stream() -> flask.Response:
        return flask.Response(str(number) for number in range(3))

    @server.route("/flask/redirect")
    def redirect() -> object:
        return flask.redirect("/text")

    @server.route("/flask/slash/")
    def slash() -> str:
        return "slash"

    @server.route("/flask/abort")
    def abort() -> object:
        flask.abort(418)

    @server.route("/flask/raises")
    def raises() -> object:
        raise ValueError("a bug")

    @server.route("/flask/pieces")
    def pieces() -> flask.Response:
        response = flask.Response([b"one", b"", b"two"], headers=[("X-A", "1")])
        response.headers["Connection"] = "close"
        return response

    @server.route("/flask/file")
    def file() -> flask.Response:
        wrapped = wrap_file(flask.request.environ, io.BytesIO(BIG[:20_000]), 4096)
        return flask.Response(wrapped, direct_passthrough=True)

    @server.route("/flask/item/<int:number>")
    def item(number: int) -> str:
        return f"item {number}"

    @server.route("/flask/cookie")
    def cookie() -> flask.Response:
        response = flask.Response("c")
        response.set_cookie("name", flask.request.cookies.get("name", "none"))
        return response


express = declare(HttpServer())
by_flask = declare(HttpServer())
by_flask.before_request(lambda: None)

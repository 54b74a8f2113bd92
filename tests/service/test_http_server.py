"""The embedding API: declaring routes, what handlers may return, groups, patterns, middleware, Flask beside it."""

from __future__ import annotations

import io

import flask
import pytest

from service import HttpServer, Request, Response
from service.errors import HttpError
from service.routing import Next
from service.server import Blueprint
from workers.errors import InvalidInput, TooLarge


@pytest.fixture
def server() -> HttpServer:
    return HttpServer()


def test_a_bare_server_has_no_routes(server: HttpServer) -> None:
    assert server.test_client().get("/health").status_code == 404


def test_get_and_post_work_as_decorator_and_as_call(server: HttpServer) -> None:
    @server.get("/a")
    def a(request: Request) -> str:
        return f"a {request.method}"

    server.get("/b", lambda request: "b")
    server.post("/a", lambda request: request.body)
    http = server.test_client()
    assert a(Request({"REQUEST_METHOD": "X"}, 0)) == "a X"
    assert [http.get("/a").text, http.get("/b").text, http.post("/a", data=b"\0").data] == ["a GET", "b", b"\0"]


@pytest.mark.parametrize(
    ("returned", "content_type", "body"),
    [
        ({"b": 1, "a": "ü"}, "application/json", '{"b":1,"a":"ü"}'.encode()),
        ([1, None], "application/json", b"[1,null]"),
        ("ü", "text/plain; charset=utf-8", "ü".encode()),
        (b"\xff\0", "application/octet-stream", b"\xff\0"),
        (Response.json({"a": 1}, status=201), "application/json", b'{"a":1}'),
        (Response.bytes(b"x", "image/png"), "image/png", b"x"),
        (flask.Response("<p>", 202, mimetype="text/html"), "text/html; charset=utf-8", b"<p>"),
    ],
)
def test_what_a_handler_returns_is_what_is_sent(
    server: HttpServer, returned: object, content_type: str, body: bytes
) -> None:
    server.get("/", lambda request: returned)
    answer = server.test_client().get("/")
    assert (answer.headers["Content-Type"], answer.data) == (content_type, body)
    assert answer.status_code == getattr(returned, "status_code", getattr(returned, "status", 200))


def test_a_handler_that_returns_nothing_or_nan_is_told_apart(server: HttpServer) -> None:
    server.get("/none", lambda request: None)
    server.get("/nan", lambda request: {"a": float("nan")})
    http = server.test_client()
    assert http.get("/none").get_json() == {"error": "internal error"}
    assert (http.get("/nan").status_code, http.get("/nan").get_json()["code"]) == (422, "INVALID_OUTPUT")


def test_handlers_raise_errors_that_have_an_answer(server: HttpServer) -> None:
    def invalid(request: Request) -> str:
        raise InvalidInput("'x' is required")

    def teapot(request: Request) -> str:
        raise HttpError(418, "short and stout", [("X-Spout", "1")])

    def aborts(request: Request) -> str:
        flask.abort(404, "no such thing")

    server.post("/invalid", invalid)
    server.get("/teapot", teapot)
    server.get("/aborts", aborts)
    server.post("/json", lambda request: {"got": request.json()})
    http = server.test_client()
    assert http.post("/invalid").data == b'{"error":"\'x\' is required"}'
    assert (http.get("/teapot").status_code, http.get("/teapot").headers["X-Spout"]) == (418, "1")
    assert (http.get("/aborts").status_code, http.get("/aborts").data) == (404, b'{"error":"no such thing"}')
    assert http.post("/json", data=b"[1]").data == b'{"got":[1]}'
    assert (http.post("/json", data=b"[").status_code, http.post("/json", data=b"[").data) == (
        400,
        b'{"error":"invalid json"}',
    )


def test_a_request_shows_its_parts(server: HttpServer) -> None:
    @server.get("/ü x")
    def show(request: Request) -> dict[str, object]:
        headers = request.headers
        return {
            "path": request.path,
            "query": request.query,
            "header": headers["x-PROBE"],
            "absent": headers.get("nope"),
            "type": headers.get("Content-Type"),
            "listed": "X-Probe" in list(headers),
        }

    headers = {"X-Probe": "1", "Content-Type": "a/b"}
    answer = server.test_client().get("/%C3%BC%20x?a=1&b=&a=2&c=%C3%BC", headers=headers)
    assert answer.get_json() == {
        "path": "/ü x",
        "query": {"a": "1", "b": "", "c": "ü"},
        "header": "1",
        "absent": None,
        "type": "a/b",
        "listed": True,
    }


def test_patterns_capture_and_no_slash_gets_past_them(server: HttpServer) -> None:
    @server.route("GET", r"/users/(\d+)/files/(?P<name>[^/]+)", pattern=True)
    def file(request: Request) -> list[str]:
        return [request.param(0), request.param("name")]

    http = server.test_client()
    assert http.get("/users/12/files/a%20b.txt").get_json() == ["12", "a b.txt"]
    for path in ("/users/x/files/a", "/users/1/files/a/b", "/users/1/files/a%2Fb", "/users/1"):
        assert http.get(path).status_code == 404
    assert http.head("/users/1/files/a").status_code == 200
    refused = http.post("/users/1/files/a")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD, OPTIONS")


def test_a_capture_that_is_not_there_is_a_clear_error(server: HttpServer) -> None:
    seen: list[str] = []

    @server.route("GET", "/(a)?", pattern=True)
    def handler(request: Request) -> str:
        for key in ("nope", 7, -1):
            with pytest.raises(KeyError, match="no capture"):
                request.param(key)
        seen.append(request.param(0))
        return "ok"

    http = server.test_client()
    assert [http.get("/a").text, http.get("/").text, seen] == ["ok", "ok", ["a", ""]]


def test_fixed_paths_win_over_patterns_and_share_their_methods(server: HttpServer) -> None:
    server.route("GET", "/things/[^/]+", lambda request: "pattern", pattern=True)
    server.route("PUT", "/things/[^/]+", lambda request: "put", pattern=True)
    server.get("/things/one", lambda request: "fixed")
    server.post("/things/one", lambda request: "post")
    http = server.test_client()
    assert [http.get("/things/one").text, http.get("/things/two").text] == ["fixed", "pattern"]
    assert [http.put("/things/one").text, http.post("/things/one").text] == ["put", "post"]
    assert http.delete("/things/one").headers["Allow"] == "GET, HEAD, OPTIONS, POST, PUT"
    assert http.options("/things/one").headers["Allow"] == "GET, HEAD, OPTIONS, POST, PUT"


def test_a_route_for_head_or_options_goes_before_the_automatic_answer(server: HttpServer) -> None:
    def says(text: str) -> object:
        return lambda request: Response(b"", headers=[("X-By", text)])

    server.get("/fixed", lambda request: "get")
    server.route("HEAD", "/fixed", says("head"))
    server.route("OPTIONS", "/fixed", says("options"))
    server.route("GET", "/pattern/.*", lambda request: "get", pattern=True)
    server.route("HEAD", "/pattern/.*", says("head of pattern"), pattern=True)
    server.get("/other", lambda request: "get")
    server.route("/flask")(lambda: "view")
    server.route("OPTIONS", "/(?:other|flask|pattern/x)", says("options of pattern"), pattern=True)
    http = server.test_client()
    answers = [http.head("/fixed"), http.options("/fixed"), http.head("/pattern/x"), http.options("/pattern/x")]
    assert [answer.headers["X-By"] for answer in answers] == [
        "head",
        "options",
        "head of pattern",
        "options of pattern",
    ]
    for path in ("/other", "/flask"):
        assert http.options(path).headers["X-By"] == "options of pattern"


def test_the_automatic_answer_to_options_passes_middleware(server: HttpServer) -> None:
    @server.use
    def cors(request: Request, following: Next) -> Response:
        response = following(request)
        response.headers["Access-Control-Allow-Origin"] = "*"
        return response

    server.get("/fixed", lambda request: "ok")
    server.route("GET", "/pattern/.*", lambda request: "ok", pattern=True)
    server.route("/flask")(lambda: "ok")
    http = server.test_client()
    for path in ("/fixed", "/pattern/x", "/flask"):
        answer = http.options(path)
        assert (answer.status_code, answer.headers["Allow"]) == (200, "GET, HEAD, OPTIONS")
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Origin" not in http.options("/nope").headers


def test_no_pattern_gets_out_of_its_group(server: HttpServer) -> None:
    admin = server.group("/admin").group("/v1")
    admin.route("GET", "/a|/b", lambda request: "alternatives", pattern=True)
    admin.route("GET", r"^/x/(\d+)$", lambda request: request.param(0), pattern=True)
    admin.route("GET", "(?i)/case", lambda request: "any case", pattern=True)
    server.route("GET", r"^/top/(\d+)$", lambda request: request.param(0), pattern=True)
    http = server.test_client()
    assert [http.get(f"/admin/v1{path}").text for path in ("/a", "/b", "/x/7")] == ["alternatives"] * 2 + ["7"]
    assert [http.get("/admin/v1/CASE").text, http.get("/top/8").text] == ["any case", "8"]
    for path in ("/b", "/x/7", "/case", "/ADMIN/v1/case", "/admin/v1/top/8"):
        assert http.get(path).status_code == 404


def test_a_blueprints_prefix_is_joined_as_flask_joins_it(server: HttpServer) -> None:
    blueprint = Blueprint("p", __name__)
    blueprint.get("/fixed", lambda request: "fixed")
    blueprint.route("GET", "/pattern/.", lambda request: "pattern", pattern=True)
    server.register_blueprint(blueprint, url_prefix="/p/")
    http = server.test_client()
    assert [http.get("/p/fixed").text, http.get("/p/pattern/x").text] == ["fixed", "pattern"]
    assert http.get("/p//pattern/x").status_code == 404


def test_groups_put_a_prefix_before_routes_of_either_kind(server: HttpServer) -> None:
    v1 = server.group("/api.x").group("/v1")
    v1.get("/a", lambda request: "a")
    v1.route("GET", r"/b/(\d+)", lambda request: request.param(0), pattern=True)

    @v1.post("/a")
    def post(request: Request) -> str:
        return "posted"

    http = server.test_client()
    assert [http.get("/api.x/v1/a").text, http.get("/api.x/v1/b/7").text] == ["a", "7"]
    assert http.post("/api.x/v1/a").text == "posted"
    assert http.get("/apixx/v1/b/7").status_code == 404


def test_middleware_runs_first_registered_outermost_around_every_matched_route(server: HttpServer) -> None:
    order: list[str] = []

    def around(name: str) -> None:
        @server.use
        def middleware(request: Request, following: Next) -> Response:
            order.append(f"{name} in")
            response = following(request)
            order.append(f"{name} out {response.status}")
            response.headers[f"X-{name}"] = "1"
            return response

    around("Outer")
    server.get("/fixed", lambda request: "ok")
    server.route("GET", "/pattern/.*", lambda request: "ok", pattern=True)

    @server.route("/flask/<name>")
    def view(name: str) -> str:
        return name

    @server.get("/fails")
    def fails(request: Request) -> str:
        raise InvalidInput("no")

    around("Inner")
    http = server.test_client()
    for path, status in (("/fixed", 200), ("/pattern/x", 200), ("/flask/x", 200), ("/fails", 400)):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["X-Outer"], answer.headers["X-Inner"]) == (status, "1", "1")
        assert order == ["Outer in", "Inner in", f"Inner out {status}", f"Outer out {status}"]
        order.clear()
    assert http.get("/unmatched").status_code == 404
    assert order == []


def test_middleware_can_answer_by_itself_and_replace_the_answer(server: HttpServer) -> None:
    def guard(request: Request, following: Next) -> object:
        if "Authorization" not in request.headers:
            return Response.json({"error": "who are you"}, status=401)
        following(request)
        return {"replaced": True}

    calls: list[str] = []
    server.use(guard)
    server.get("/", lambda request: calls.append("called") or "ok")
    http = server.test_client()
    assert (http.get("/").status_code, calls) == (401, [])
    assert (http.get("/", headers={"Authorization": "me"}).data, calls) == (b'{"replaced":true}', ["called"])


def test_late_declarations_are_refused(server: HttpServer) -> None:
    server.get("/early", lambda request: "ok")
    server.test_client().get("/early")
    with pytest.raises(RuntimeError, match="GET /late is declared too late"):
        server.get("/late", lambda request: "ok")
    with pytest.raises(RuntimeError, match="too late"):
        server.use(lambda request, following: following(request))


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("get", "/x", "not an HTTP method"),
        ("GET", "x", "does not begin with '/'"),
        ("GET", "/a/<b>", "pattern=True"),
        ("GET", "/twice", "declared twice"),
    ],
)
def test_a_route_that_cannot_be_is_refused_when_declared(
    server: HttpServer, method: str, path: str, message: str
) -> None:
    server.get("/twice", lambda request: "ok")
    with pytest.raises(ValueError, match=message):
        server.route(method, path, lambda request: "ok")


def test_flask_beside_it_keeps_working_and_answers_errors_in_json(server: HttpServer) -> None:
    @server.route("/flask/", methods=["GET", "PUT"])
    def view() -> tuple[str, int]:
        return flask.request.method, 203

    @server.route("/boom")
    def boom() -> str:
        raise ZeroDivisionError

    @server.errorhandler(KeyError)
    def on_key_error(error: KeyError) -> tuple[dict[str, str], int]:
        return {"mine": str(error)}, 410

    def key_error(request: Request) -> str:
        raise KeyError("k")

    server.get("/own", key_error)
    http = server.test_client()
    assert (http.put("/flask/").text, http.put("/flask/").status_code) == ("PUT", 203)
    redirected = http.get("/flask")
    assert (redirected.status_code, redirected.data) == (308, b"")
    assert redirected.headers["Location"].endswith("/flask/")
    assert http.get("/boom").data == b'{"error":"internal error"}'
    assert (http.get("/own").status_code, http.get("/own").get_json()) == (410, {"mine": "'k'"})


def test_middleware_and_whoever_answers_may_each_read_the_body(server: HttpServer) -> None:
    @server.use
    def measure(request: Request, following: Next) -> Response:
        size = len(request.body)
        response = following(request)
        response.headers["X-Size"] = str(size)
        return response

    server.post("/own", lambda request: request.body)
    server.route("/flask", methods=["POST"])(lambda: flask.request.get_data())
    server.route("/form", methods=["POST"], endpoint="form")(lambda: flask.request.form["a"])
    http = server.test_client()
    for path in ("/own", "/flask"):
        answer = http.post(path, data=b"body")
        assert (answer.data, answer.headers["X-Size"]) == (b"body", "4")
    assert http.post("/form", data={"a": "form"}).data == b"form"


def test_a_body_that_was_refused_once_stays_refused(server: HttpServer) -> None:
    def twice(request: Request) -> bytes:
        with pytest.raises(TooLarge):
            _ = request.body
        return request.body

    server = HttpServer(body_limit=3)
    server.post("/", twice)
    chunked = {"wsgi.input": io.BytesIO(b"123456789"), "HTTP_TRANSFER_ENCODING": "chunked"}
    assert server.test_client().post("/", environ_overrides=chunked).status_code == 413


def test_flasks_url_map_has_every_fixed_route(server: HttpServer) -> None:
    server.get("/a.b", lambda request: "ok")
    assert any(rule.rule == "/a.b" and "GET" in (rule.methods or ()) for rule in server.url_map.iter_rules())


def test_a_stream_of_events_is_framed_and_closed(server: HttpServer) -> None:
    closed: list[bool] = []

    def events():  # type: ignore[no-untyped-def]
        try:
            yield {"event": "token", "data": "a "}
            yield {"data": {"ü": 1}, "id": "7", "retry": 10}
            yield {"data": "x\ny\r\n\rz"}
        finally:
            closed.append(True)

    server.get("/", lambda request: Response.sse(events()))
    answer = server.test_client().get("/")
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.text == (
        'event: token\ndata: a \n\nid: 7\nretry: 10\ndata: {"ü":1}\n\ndata: x\ndata: y\ndata: \ndata: z\n\n'
    )
    assert closed == [True]


def test_a_stream_that_fails_ends_with_an_error_event(server: HttpServer) -> None:
    def events(error: Exception):  # type: ignore[no-untyped-def]
        yield {"data": "a"}
        raise error

    server.get("/known", lambda request: Response.sse(events(InvalidInput("bad"))))
    server.get("/unknown", lambda request: Response.sse(events(ZeroDivisionError("secret"))))
    http = server.test_client()
    known, unknown = http.get("/known").text, http.get("/unknown").text
    assert known == 'data: a\n\nevent: error\ndata: {"error":"bad","code":"INVALID_INPUT"}\n\n'
    assert unknown == 'data: a\n\nevent: error\ndata: {"error":"internal error"}\n\n'


@pytest.mark.parametrize("event", [{"event": "a\nb"}, {"id": "a\0"}, {"date": "typo"}])
def test_an_event_that_would_break_the_framing_is_refused(event: dict[str, object]) -> None:
    from service.sse import frame

    with pytest.raises(ValueError, match="event"):
        frame(event)

"""A route is express only while nothing that Flask would have applied is skipped.

Which way a request went is told by its handler, which Flask gives a context and the express lane does not.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import flask
import pytest
from flask import signals
from flask.sessions import SecureCookieSessionInterface
from werkzeug.exceptions import InternalServerError
from werkzeug.test import create_environ

from service import HttpServer, Request, Response
from service.environ import VIEWS_KEY
from service.errors import HttpError
from service.express import STEPS
from service.routing import Next
from service.server import Blueprint
from workers.errors import InvalidInput, Overloaded, PoolError, WorkerDied

BY_FLASK, EXPRESS = "by Flask", "express."  # of one length


def way(request: Request) -> str:
    return BY_FLASK if flask.has_request_context() else EXPRESS


@dataclass
class Answer:
    status: str
    headers: list[tuple[str, str]]
    pieces: list[Any]

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def text(self) -> str:
        return self.body.decode()

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)

    def but_for_the_way(self) -> tuple[str, list[tuple[str, str]], bytes]:
        body = self.body.replace(BY_FLASK.encode(), EXPRESS.encode())
        return self.status, [header for header in self.headers if header[0] != "X-Request-ID"], body


def ask(server: HttpServer, path: str = "/light", method: str = "GET", data: bytes = b"", **environ: object) -> Answer:
    """What a WSGI server would have sent."""
    pieces: list[Any] = []
    begun: list[tuple[str, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[Any], None]:
        begun.append((status, list(headers)))
        return pieces.append

    if environ.get(VIEWS_KEY) == "ours":
        environ[VIEWS_KEY] = start_response
    body = server({**create_environ(path, method=method, data=data), **environ}, start_response)
    try:
        pieces.extend(body)
    finally:
        getattr(body, "close", lambda: None)()
    ((status, headers),) = begun
    return Answer(status, headers, pieces)


def light(server: HttpServer | None = None) -> HttpServer:
    server = server or HttpServer()
    server.get("/light", way)
    return server


def usual() -> tuple[str, list[tuple[str, str]], bytes]:
    answer = ask(light())
    assert answer.text == EXPRESS
    return answer.but_for_the_way()


# Hooks

ON_APP = ("before_request", "after_request", "teardown_request", "url_value_preprocessor")
ON_ALL = ("before_app_request", "after_app_request", "teardown_app_request", "app_url_value_preprocessor")
EVERYWHERE = ("/light", "/parent", "/parent/child", "/other")
HOOKS = [
    *(("app", kind, EVERYWHERE) for kind in (*ON_APP, "teardown_appcontext")),
    *(("other", kind, EVERYWHERE) for kind in ON_ALL),
    *(("parent", kind, ("/parent", "/parent/child")) for kind in ON_APP),
    *(("child", kind, ("/parent/child",)) for kind in ON_APP),
    *(("other", kind, ("/other",)) for kind in ON_APP),
]


@pytest.mark.parametrize(("owner", "kind", "paths"), HOOKS, ids=[f"{kind} of {owner}" for owner, kind, _ in HOOKS])
def test_a_hook_has_its_effect_on_the_routes_it_is_for_and_leaves_the_others_express(
    owner: str, kind: str, paths: tuple[str, ...]
) -> None:
    called: list[str] = []

    def hook(*arguments: Any) -> Any:
        called.append("called")
        return arguments[0] if kind.startswith("after") else None

    server = light()
    owners = {"app": server, **{name: Blueprint(name, __name__) for name in ("parent", "child", "other")}}
    owners["parent"].get("/", way)
    owners["child"].get("/child", way)
    owners["other"].get("/other", way)
    getattr(owners[owner], kind)(hook)
    owners["parent"].register_blueprint(owners["child"])
    server.register_blueprint(owners["parent"], url_prefix="/parent")
    server.register_blueprint(owners["other"])
    for path in ("/light", "/parent/", "/parent/child", "/other"):
        answer = ask(server, path)
        applies = path.rstrip("/") in paths
        assert (path, answer.text, called) == (path, BY_FLASK if applies else EXPRESS, ["called"] if applies else [])
        assert answer.but_for_the_way() == usual()
        called.clear()


def test_a_hook_of_a_blueprint_counts_under_every_name_it_is_registered_by() -> None:
    server, blueprint = HttpServer(), Blueprint("one", __name__)
    blueprint.get("/x", way)
    blueprint.before_request(lambda: "held")
    server.register_blueprint(blueprint)
    server.register_blueprint(blueprint, name="two", url_prefix="/two")
    assert [ask(server, path).text for path in ("/x", "/two/x")] == ["held", "held"]


def test_a_hook_that_comes_after_express_requests_takes_effect() -> None:
    server = light()
    assert ask(server).text == EXPRESS
    server.before_request_funcs.setdefault(None, []).append(lambda: ("held", 401))
    assert (ask(server).status, ask(server).text) == ("401 UNAUTHORIZED", "held")
    server.before_request_funcs[None].clear()
    assert ask(server).text == EXPRESS


def test_flasks_own_declarations_are_refused_once_express_requests_were_served() -> None:
    server = light()
    assert ask(server).text == EXPRESS
    for method in (*ON_APP, "teardown_appcontext", "errorhandler", "register_blueprint", "add_url_rule"):
        with pytest.raises(AssertionError, match="can no longer be called"):
            getattr(server, method)(lambda *_: None)


@pytest.mark.parametrize(
    "name",
    [
        "request_started",
        "request_finished",
        "request_tearing_down",
        "appcontext_pushed",
        "appcontext_popped",
        "appcontext_tearing_down",
    ],
)
def test_who_listens_to_a_signal_hears_of_every_request(name: str) -> None:
    server, heard = light(), []
    assert ask(server).text == EXPRESS
    signal = getattr(signals, name)
    with signal.connected_to(lambda sender, **_: heard.append(sender), server):
        answer = ask(server)
    assert (answer.text, heard, answer.but_for_the_way()) == (BY_FLASK, [server], usual())
    assert (ask(server).text, len(heard)) == (EXPRESS, 1)


# What Flask does for a request, replaced

FOR_EVERY_REQUEST = STEPS - {
    *("handle_exception", "handle_http_exception", "handle_user_exception", "trap_http_exception"),  # for failures
    "ensure_sync",  # for hooks and Flask's views
}


def replaced(step: str, called: list[str]) -> Any:
    """Another one of it for a class, which notes that it was called."""
    original = getattr(HttpServer, step)
    if step == "session_interface":
        return type(
            "Sessions", (SecureCookieSessionInterface,), {"open_session": _noting(original.open_session, called)}
        )()
    if isinstance(original, type):
        return type(step, (original,), {"__init__": _noting(original.__init__, called)})
    return _noting(original, called)


def _noting(original: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def noting(self: Any, *arguments: Any, **options: Any) -> Any:
        called.append("called")
        bound = getattr(original, "__self__", None) is not None
        return original(*arguments, **options) if bound else original(self, *arguments, **options)

    return noting


@pytest.mark.parametrize("step", sorted(STEPS))
def test_a_step_of_flasks_that_an_application_has_replaced_is_taken(step: str) -> None:
    called: list[str] = []
    new = replaced(step, called)
    by_subclass = light(type("Mine", (HttpServer,), {step: new})())
    by_instance = light()
    assert ask(by_instance).text == EXPRESS
    is_method = callable(new) and not isinstance(new, type)
    setattr(by_instance, step, new.__get__(by_instance) if is_method else new)
    for server in (by_subclass, by_instance):
        answer = ask(server)
        assert (answer.text, answer.but_for_the_way()) == (BY_FLASK, usual())
        assert bool(called) == (step in FOR_EVERY_REQUEST)
        called.clear()


def test_a_subclass_that_replaces_nothing_of_it_stays_express() -> None:
    class Mine(HttpServer):
        def something_else(self) -> None: ...

    assert ask(light(Mine())).text == EXPRESS


def test_a_wrapper_around_wsgi_app_sees_every_request() -> None:
    server = light()
    assert ask(server).text == EXPRESS
    inner, seen = server.wsgi_app, []

    def wrapper(environ: Any, start_response: Any) -> Any:
        seen.append(environ["PATH_INFO"])
        return inner(environ, start_response)

    server.wsgi_app = wrapper  # type: ignore[method-assign]
    assert (ask(server).text, seen) == (BY_FLASK, ["/light"])


@pytest.mark.parametrize("served_before", [False, True])
@pytest.mark.parametrize("with_middleware", [False, True])
def test_a_view_that_an_application_has_put_around_a_light_one_is_taken(
    served_before: bool, with_middleware: bool
) -> None:
    """As applications do that guard all of their views in one loop."""
    server, order = light(), []
    blueprint = Blueprint("b", __name__)
    blueprint.get("/x", way)
    server.register_blueprint(blueprint, url_prefix="/b")
    if with_middleware:

        @server.use
        def middleware(request: Request, following: Next) -> Response:
            order.append("middleware")
            response = following(request)
            order.append(str(response.status))
            return response

    if served_before:
        assert (ask(server).text, ask(server, "/b/x").text) == (EXPRESS, EXPRESS)
        order.clear()

    def guarded(view: Callable[[], Any]) -> Callable[[], Any]:
        def guard() -> Any:
            order.append("guard")
            return view() if "Authorization" in flask.request.headers else ("who are you", 401)

        return guard

    for endpoint, view in list(server.view_functions.items()):
        server.view_functions[endpoint] = guarded(view)
    for path in ("/light", "/b/x"):
        for headers, status, text in (({}, 401, "who are you"), ({"HTTP_AUTHORIZATION": "me"}, 200, BY_FLASK)):
            answer = ask(server, path, **headers)
            assert (answer.status[:3], answer.text) == (str(status), text)
            assert order == (["middleware", "guard", str(status)] if with_middleware else ["guard"])
            order.clear()


def test_what_a_light_view_raises_within_another_reaches_the_error_handlers() -> None:
    server = HttpServer()
    server.get("/raises", raising(InvalidInput("no")))
    view = server.view_functions["GET /raises"]
    server.view_functions["GET /raises"] = lambda: view()
    assert (ask(server, "/raises").status, ask(server, "/raises").body) == ("400 Bad Request", b'{"error":"no"}')


# What an application's settings, or the request itself, ask for

CONFIGURED: dict[str, Callable[[HttpServer], object]] = {
    "TRUSTED_HOSTS": lambda server: server.config.update(TRUSTED_HOSTS=["localhost"]),
    "SERVER_NAME": lambda server: server.config.update(SERVER_NAME="localhost"),
    "host_matching": lambda server: setattr(server.url_map, "host_matching", True),
    "subdomain_matching": lambda server: setattr(server, "subdomain_matching", True),
}


@pytest.mark.parametrize("setting", CONFIGURED)
def test_what_flask_makes_of_host_names_it_makes_of_every_request(setting: str) -> None:
    server = light()
    assert ask(server).text == EXPRESS
    CONFIGURED[setting](server)
    answer = ask(server)
    assert (answer.text, answer.but_for_the_way()) == (BY_FLASK, usual())


def test_a_host_that_is_not_trusted_gets_nothing_from_any_route() -> None:
    server = light()
    server.route("GET", "/pattern/.*", way, pattern=True)
    server.route("/flask")(lambda: "flask")
    server.config["TRUSTED_HOSTS"] = ["trusted.example"]
    for path in ("/light", "/pattern/x", "/flask"):
        assert ask(server, path, HTTP_HOST="trusted.example").status == "200 OK"
        assert ask(server, path, HTTP_HOST="evil.example").status == "400 Bad Request"


def test_an_ordinary_host_is_express() -> None:
    server = light()
    for host in ("a", "A.b-c.example", "127.0.0.1:8080", "a:99999", "x" * 63):
        assert (host, ask(server, HTTP_HOST=host).text) == (host, EXPRESS)


def test_no_host_at_all_is_express() -> None:
    server, environ = light(), create_environ("/light")
    del environ["HTTP_HOST"]
    assert list(server(environ, lambda *_: None)) == [b"express."]


def test_an_odd_host_is_flasks_to_judge() -> None:
    server = light()
    for host in ("", "a_b", "[::1]", "[::1]:80", "a.", "a b", "é", "a:x"):
        answer = ask(server, HTTP_HOST=host)
        assert (host, answer.text, answer.but_for_the_way()) == (host, BY_FLASK, usual())
    for host in ("a..b", "x" * 64):  # no hosts to Flask
        assert (host, ask(server, HTTP_HOST=host).status) == (host, "400 Bad Request")


def test_a_session_is_renewed() -> None:
    server = light()
    server.secret_key = "secret"
    server.permanent_session_lifetime = timedelta(days=1)

    @server.route("/log-in")
    def log_in() -> str:
        flask.session.permanent = True
        flask.session["user"] = "me"
        return "in"

    cookie = (ask(server, "/log-in").header("Set-Cookie") or "").partition(";")[0]
    assert ask(server).text == EXPRESS
    renewed = ask(server, HTTP_COOKIE=cookie)
    assert (renewed.text, (renewed.header("Set-Cookie") or "").startswith("session=")) == (BY_FLASK, True)
    server.secret_key = None
    assert ask(server, HTTP_COOKIE=cookie).text == EXPRESS


@pytest.mark.parametrize(
    "environ",
    [{"SCRIPT_NAME": "/mounted"}, {"HTTP_UPGRADE": "h2c", "HTTP_CONNECTION": "upgrade"}],
    ids=["SCRIPT_NAME", "Upgrade"],
)
def test_an_unusual_request_is_flasks(environ: dict[str, object]) -> None:
    answer = ask(light(), **environ)
    assert (answer.text, answer.but_for_the_way()) == (BY_FLASK, usual())


def test_paths_that_are_not_ascii_and_patterns_are_flasks() -> None:
    server = light()
    server.get("/ü", way)
    server.route("GET", "/pattern/.*", way, pattern=True)
    for path in ("/ü", "/pattern/x"):
        assert ask(server, path).text == BY_FLASK


def test_methods_that_nothing_is_declared_for_are_flasks() -> None:
    server = light()
    head, options, put = (ask(server, method=method) for method in ("HEAD", "OPTIONS", "PUT"))
    assert (head.but_for_the_way(), options.header("Allow")) == ((*usual()[:2], b""), "GET, HEAD, OPTIONS")
    assert (put.status, put.header("Allow")) == ("405 Method Not Allowed", "GET, HEAD, OPTIONS")


def test_a_route_for_options_is_express_and_one_for_head_sends_no_body() -> None:
    server = HttpServer()
    server.route("OPTIONS", "/x", way)
    server.route("HEAD", "/x", lambda request: "body")
    assert ask(server, "/x", "OPTIONS").text == EXPRESS
    assert (ask(server, "/x", "HEAD").body, ask(server, "/x", "HEAD").header("Content-Length")) == (b"", "4")


def test_a_test_client_that_keeps_the_context_gets_it() -> None:
    server = light()
    with server.test_client() as http:
        assert http.get("/light?a=1").text == BY_FLASK
        assert flask.request.args["a"] == "1"
    assert server.test_client().get("/light").text == EXPRESS


def test_flasks_globals_are_not_there_on_the_express_lane() -> None:
    server = HttpServer()
    server.get("/", lambda request: flask.request.path)
    assert (ask(server, "/").status, ask(server, "/").body) == (
        "500 Internal Server Error",
        b'{"error":"internal error"}',
    )


# One application, both ways


def both_ways(
    declare: Callable[[HttpServer], object], path: str = "/x", data: bytes = b"", **environ: object
) -> Answer:
    """The answer, which is the same on the express lane and through Flask."""
    answers = []
    for hooked in (False, True):
        server = HttpServer()
        declare(server)
        if hooked:
            server.before_request(lambda: None)
        answers.append(ask(server, path, data=data, **environ))
    express, by_flask = answers
    assert express.but_for_the_way() == by_flask.but_for_the_way()
    return express


def raising(error: BaseException) -> Callable[[Request], object]:
    def handler(request: Request) -> object:
        raise error

    return handler


def x(handler: Callable[[Request], object], *handled: tuple[Any, Callable[[Any], Any]]) -> Callable[[HttpServer], None]:
    """A route `/x`, and error handlers."""

    def declare(server: HttpServer) -> None:
        server.get("/x", handler)
        for kind, error_handler in handled:
            server.register_error_handler(kind, error_handler)

    return declare


def where(error: Exception) -> tuple[str, int]:
    """An error handler, in which Flask's context is there."""
    return f"{type(error).__name__} at {flask.request.path} of {flask.request.endpoint}", 418


def aborting(*arguments: Any) -> Callable[[Request], object]:
    return lambda request: flask.abort(*arguments)


@pytest.mark.parametrize(
    ("handler", "kind", "said"),
    [
        (raising(KeyError("k")), KeyError, "KeyError"),
        (raising(KeyError("k")), LookupError, "KeyError"),
        (raising(KeyError("k")), Exception, "KeyError"),
        (raising(InvalidInput("no")), InvalidInput, "InvalidInput"),
        (raising(WorkerDied("gone")), PoolError, "WorkerDied"),
        (raising(HttpError(409, "no")), HttpError, "HttpError"),
        (aborting(404), 404, "NotFound"),
        (aborting(404), Exception, "NotFound"),
        (lambda request: None, TypeError, "TypeError"),
        (lambda request: {"a": float("nan")}, PoolError, "InvalidOutput"),
        (lambda request: request.json(), HttpError, "HttpError"),
    ],
)
def test_error_handlers_apply_with_flasks_context(handler: Callable[[Request], object], kind: Any, said: str) -> None:
    answer = both_ways(x(handler, (kind, where)))
    assert (answer.status[:3], answer.text) == ("418", f"{said} at /x of GET /x")


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (InvalidInput("no"), "400 Bad Request", b'{"error":"no"}'),
        (Overloaded("full"), "429 Too Many Requests", b'{"error":"full","code":"OVERLOADED"}'),
        (WorkerDied("gone"), "500 Internal Server Error", b'{"error":"gone","code":"WORKER_DIED"}'),
        (ZeroDivisionError(), "500 Internal Server Error", b'{"error":"internal error"}'),
        (InternalServerError(), "500 Internal Server Error", b'{"error":"internal error"}'),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_is_raised_is_answered_alike(error: Exception, status: str, body: bytes) -> None:
    def by_middleware(server: HttpServer) -> None:
        server.get("/x", way)
        server.use(lambda request, following: raising(error)(request))

    for declare in (x(raising(error)), by_middleware):
        answer = both_ways(declare)
        assert (answer.status, answer.body) == (status, body)


def test_error_handlers_apply_to_what_middleware_raises() -> None:
    def declare(server: HttpServer) -> None:
        server.get("/x", way)
        server.use(lambda request, following: raising(KeyError("k"))(request))
        server.register_error_handler(KeyError, where)

    assert both_ways(declare).text == "KeyError at /x of GET /x"


def test_a_blueprints_error_handlers_apply_to_its_routes_alone() -> None:
    def declare(server: HttpServer) -> None:
        blueprint = Blueprint("b", __name__)
        blueprint.get("/x", raising(KeyError("k")))
        blueprint.register_error_handler(KeyError, where)
        server.register_blueprint(blueprint, url_prefix="/b")
        server.get("/x", raising(KeyError("k")))

    assert both_ways(declare, "/b/x").text == "KeyError at /b/x of b.GET /x"
    assert both_ways(declare).status == "500 Internal Server Error"


def test_an_error_handler_that_raises_is_a_failure_that_another_one_may_answer() -> None:
    fails = raising(ZeroDivisionError())
    assert both_ways(x(raising(KeyError("k")), (KeyError, fails))).status == "500 Internal Server Error"
    told = both_ways(x(raising(KeyError("k")), (KeyError, fails), (ZeroDivisionError, where)))
    assert told.text == "ZeroDivisionError at /x of GET /x"


def test_abort_with_a_response_is_that_response() -> None:
    answer = both_ways(x(aborting(flask.Response("mine", 402, {"X-Mine": "1"}))))
    assert (answer.status, answer.header("X-Mine"), answer.text) == ("402 Payment Required", "1", "mine")


def test_an_error_handler_may_use_the_session_and_add_to_the_answer() -> None:
    def remember(error: Exception) -> str:
        flask.session["failed"] = True

        @flask.after_this_request
        def mark(response: flask.Response) -> flask.Response:
            response.headers["X-Marked"] = "1"
            return response

        return "remembered"

    def declare(server: HttpServer) -> None:
        x(raising(KeyError("k")), (KeyError, remember))(server)
        server.secret_key = "secret"
        server.config["SESSION_COOKIE_MAX_AGE"] = None

    answer = both_ways(declare)
    assert (answer.header("X-Marked"), (answer.header("Set-Cookie") or "").startswith("session=")) == ("1", True)


@pytest.mark.parametrize(
    "config",
    [
        {"PROPAGATE_EXCEPTIONS": True},
        {"TESTING": True},
        {"DEBUG": True},
        {"TRAP_HTTP_EXCEPTIONS": True},
        {"TRAP_BAD_REQUEST_ERRORS": True},
        {"MAX_CONTENT_LENGTH": 1},
        {"MAX_FORM_MEMORY_SIZE": 1},
        {"PROVIDE_AUTOMATIC_OPTIONS": False},
    ],
    ids=lambda config: next(iter(config)),
)
def test_flasks_settings_change_both_ways_alike(config: dict[str, object]) -> None:
    for handler in (
        way,
        raising(ZeroDivisionError()),
        raising(InvalidInput("no")),
        aborting(404),
        aborting(400),
        lambda request: flask.Response.force_type(flask.Response("w"), request.environ),
        lambda request: request.body,
        lambda request: request.json(),
    ):

        def declare(server: HttpServer, handler: Callable[[Request], object] = handler) -> None:
            server.config.update(config)
            x(handler)(server)

        both_ways(declare, data=b"body")


@pytest.mark.parametrize("config", ["PROPAGATE_EXCEPTIONS", "TESTING", "DEBUG"])
def test_an_error_handler_that_raises_is_let_through_where_flask_would(config: str) -> None:
    def declare(server: HttpServer) -> None:
        server.config[config] = True
        x(raising(KeyError("k")), (Exception, raising(ZeroDivisionError())))(server)

    for hooked in (False, True):
        server = HttpServer()
        declare(server)
        if hooked:
            server.before_request(lambda: None)
        with pytest.raises(ZeroDivisionError):
            ask(server, "/x")


def test_json_is_ours_whatever_flasks_provider() -> None:
    def declare(server: HttpServer) -> None:
        server.json.sort_keys = True  # type: ignore[attr-defined]
        x(lambda request: {"b": 1, "a": "ü"})(server)

    assert both_ways(declare).text == '{"b":1,"a":"ü"}'


# Middleware


def test_middleware_runs_on_the_express_lane_first_used_outermost() -> None:
    order: list[str] = []

    def around(name: str) -> Callable[[Request, Next], Response]:
        def middleware(request: Request, following: Next) -> Response:
            order.append(f"{name} in")
            response = following(request)
            order.append(f"{name} out")
            response.headers[f"X-{name}"] = "1"
            return response

        return middleware

    server = light()
    server.use(around("Outer"))
    server.use(around("Inner"))
    answer = ask(server)
    assert (answer.text, order) == (EXPRESS, ["Outer in", "Inner in", "Inner out", "Outer out"])
    assert (answer.header("X-Outer"), answer.header("X-Inner")) == ("1", "1")


def test_middleware_may_answer_by_itself() -> None:
    called: list[str] = []
    for returned in ({"short": 1}, "short", b"short", Response(b"", 204), flask.Response("w", 403)):

        def declare(server: HttpServer, returned: object = returned) -> None:
            server.get("/x", lambda request: called.append("called") or "")
            server.use(lambda request, following: returned)

        both_ways(declare)
    assert called == []


def test_middleware_may_put_another_answer_in_place() -> None:
    def declare(server: HttpServer) -> None:
        server.get("/x", way)

        @server.use
        def louder(request: Request, following: Next) -> Response:
            response = following(request)
            assert isinstance(response.body, bytes)
            return Response(response.body.upper().replace(b"BY FLASK", b"EXPRESS."), 203, response.headers)

    answer = both_ways(declare)
    assert (answer.status, answer.text) == ("203 Non-Authoritative Information", "EXPRESS.")


# Answers


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("Content-Type", "text/x"), ("X-A", "1"), ("X-A", "2")),
        (("Location", "/elsewhere"),),
        (("location", "/é?a b"), ("Content-Location", "x")),
        (("Content-Length", "7"),),
        (("content-length", "0"), ("ETag", '"x"'), ("Last-Modified", "x")),
        (("Connection", "close"), ("Transfer-Encoding", "x"), ("Date", "x"), ("Server", "x")),
    ],
)
def test_any_status_and_header_is_answered_alike(headers: tuple[tuple[str, str], ...]) -> None:
    for status in (200, 201, 204, 205, 299, 304, 400, 499, 500, 599, 100, 101, 103):
        both_ways(x(lambda request, status=status: Response(b"seven b", status, headers)))  # type: ignore[misc]


class Pieces:
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = iter(pieces)
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        self.closed += 1


def test_an_iterator_is_sent_piece_by_piece_and_closed_once() -> None:
    made: list[Pieces] = []

    def handler(request: Request) -> Response:
        made.append(Pieces(b"one", b"", b"two"))
        return Response(made[-1])

    answer = both_ways(x(handler))
    assert (b"".join(answer.pieces), answer.header("Content-Length")) == (b"onetwo", None)
    assert [pieces.closed for pieces in made] == [1, 1]


RESPONSES: dict[str, Callable[[], object]] = {
    "text": lambda: flask.Response("ü"),
    "headers": lambda: flask.Response("w", 201, {"X-W": "1", "Location": "/y"}),
    "pieces": lambda: flask.Response([b"one", b"two"]),
    "stream": lambda: flask.Response(iter([b"one", b"two"])),
    "204": lambda: flask.Response(status=204),
    "304": lambda: flask.Response("w", 304, {"ETag": '"x"'}),
    "redirect": lambda: flask.redirect("/y"),
    "cookie": lambda: _with_cookie(flask.Response("w")),
    "passed through": lambda: flask.Response(io.BytesIO(b"file"), direct_passthrough=True),
    "bytearray": lambda: Response(bytearray(b"array")),
    "tuple of pieces": lambda: Response((b"one", b"two")),
}


def _with_cookie(response: flask.Response) -> flask.Response:
    response.set_cookie("a", "b", httponly=True)
    return response


def test_any_response_is_answered_alike() -> None:
    for made in RESPONSES.values():
        both_ways(x(lambda request, made=made: made()))  # type: ignore[misc]


VIEWS = {
    "bytes": memoryview(b"0123456789"),
    "part": memoryview(b"0123456789")[2:5],
    "empty": memoryview(b""),
    "floats": memoryview(b"01234567").cast("f"),
    "two dimensions": memoryview(b"01234567").cast("B", [2, 4]),
    "every other": memoryview(b"0123456789")[::2],
    "backwards": memoryview(b"0123456789")[::-1],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_memoryview_is_bytes_where_the_server_knows_no_views_or_somebody_stands_between(kind: str) -> None:
    view = VIEWS[kind]
    for whose in ("", "ours", "the server's, and ours is another"):
        environ = {VIEWS_KEY: whose} if whose else {}
        takes_views = whose == "ours"
        for handler in (lambda request: view, lambda request: Response(view, 201)):
            answer = both_ways(x(handler), **environ)
            (piece,) = answer.pieces
            assert answer.body == view.tobytes()
            if takes_views and view.c_contiguous:
                assert piece is view
            else:
                assert type(piece) is bytes

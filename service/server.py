"""`HttpServer`: the application object. A Flask application, so a WSGI callable that any server serves.

A request passes `__call__` (id, log line) and, unless it may take the express lane (`service.express`), Flask's
routing, then `routing.run`: middleware around the handler, on the light `Request`, which needs no Flask context.
Flask's own views run there too, so that no middleware, an authentication least of all, is ever passed by. The URL map
holds every fixed route for Flask's own tools; patterns, which it cannot express, are tried when it finds nothing.
A path is taken as it is: `//x` is not `/x`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, overload

import flask
from flask.sansio.blueprints import BlueprintSetupState
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound
from werkzeug.routing import RequestRedirect
from werkzeug.utils import cached_property

from service import body, log
from service.config import Settings
from service.errors import failure, status_line
from service.express import STEPS, Express, names_of
from service.request import Request
from service.response import Response, to_response
from service.routing import Declaring, H, Handler, Middleware, Route, Routes, prefixed, run
from service.streams import EventStream, HandlerEvents

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


class FlaskRequest(flask.Request):
    """What Flask views see. They get the body as handlers do, whole or not at all: where a server says that its input
    ends by itself, as gunicorn does, werkzeug takes any end for the end of the body, the one at the limit too."""

    @cached_property
    def stream(self) -> IO[bytes]:
        server: HttpServer = flask.current_app  # type: ignore[assignment]
        return io.BytesIO(body.read(self.environ, server.body_limit))


class HttpServer(Declaring, flask.Flask):  # type: ignore[misc]  # `get` and `post` take our handlers, not views
    """A bare one has no routes and no pool; `service.create_app` makes one with the built-in routes."""

    request_class = FlaskRequest

    def __init__(self, import_name: str = "service", *, body_limit: int | None = None) -> None:
        self._express = Express(self)
        super().__init__(import_name, static_folder=None)
        self._express.changed = not all(_is_own(type(self), step) for step in STEPS)
        self.body_limit = Settings.from_env(os.environ).body_limit if body_limit is None else body_limit
        self.url_map.merge_slashes = False  # `//health` is not found, rather than redirected with a page of HTML
        self._routes = Routes()
        self._endpoints: dict[tuple[str, str], str] = {}  # of fixed routes in Flask's URL map, by method and path
        self._middleware: list[Middleware] = []
        self._started = False
        self.register_error_handler(Exception, self._flask_failure)

    # Declaring

    def declare(self, route: Route) -> None:
        self._check_not_started(route)
        self._routes.add(route)
        if route.regex is None:
            view = self._view(route, (), endpoint := _endpoint(route))
            self.add_url_rule(route.path, endpoint, view, methods=[route.method])

    def declare_on(self, blueprint: BlueprintSetupState, route: Route) -> None:
        """A route of a blueprint that is being registered."""
        self._check_not_started(route)
        full = prefixed((blueprint.url_prefix or "").rstrip("/"), route)
        self._routes.add(full)
        if route.regex is None:
            name, endpoint = f"{blueprint.name_prefix}.{blueprint.name}".lstrip("."), _endpoint(route)
            view = self._view(full, names_of(name), f"{name}.{endpoint}")
            blueprint.add_url_rule(route.path, endpoint, view, methods=[route.method])

    def _view(self, route: Route, blueprints: Sequence[str], endpoint: str) -> View:
        view = View(self, route)
        self._endpoints[route.method, route.path] = endpoint
        self._express.add(route, blueprints, endpoint, view)
        return view

    @overload  # type: ignore[override]
    def route(self, method: str, path: str, handler: None = None, *, pattern: bool = False) -> Callable[[H], H]: ...
    @overload
    def route(self, method: str, path: str, handler: H, *, pattern: bool = False) -> H: ...
    @overload
    def route(self, method: str, **options: Any) -> Callable[[Any], Any]: ...
    def route(
        self, method: str, path: str | None = None, handler: H | None = None, *, pattern: bool = False, **options: Any
    ) -> Any:
        """`route(method, path)`; with a first argument that begins with `/` it is Flask's own `route`."""
        if method.startswith("/"):
            return flask.Flask.route(self, method, **options)
        if path is None or options:
            raise TypeError("route(method, path, handler=None, *, pattern=False), or Flask's route('/path', …)")
        return self.on(method, path, handler, pattern=pattern)

    def use(self, middleware: Middleware) -> Middleware:
        """Put `middleware(request, next)` around every matched route; the first one used is the outermost."""
        self._check_not_started("middleware")
        self._middleware.append(middleware)
        return middleware

    # Answering

    def __setattr__(self, name: str, value: object) -> None:
        if name in STEPS:
            self._express.changed = True
        super().__setattr__(name, value)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if not self._started:
            self._started = self._got_first_request = True
        observed = log.Observed(environ, start_response)
        try:
            handler = self._express.handler(environ)
            if handler is None:
                return observed.watch(self.wsgi_app(environ, observed.start_response))
            return self._by_express(handler, environ, observed)
        except BaseException:
            observed.failed()
            raise

    def dispatch_request(self) -> flask.Response:
        flask_request = flask.request
        request = Request(flask_request.environ, self.body_limit)
        rule, error = flask_request.url_rule, flask_request.routing_exception
        if error is not None and not isinstance(error, (NotFound, MethodNotAllowed, RequestRedirect)):
            raise error  # a host that is not one, or not trusted
        route = self._routes.fixed(request.method, request.path)
        if route is not None:
            return self._by_view(request, self._endpoints[route.method, route.path], {})
        if not request.path.startswith("/") or request.path.startswith("//"):
            # To werkzeug `//x` is `/x`. Middleware that guards `/x` sees the path as it is, and so does the handler.
            rule, error = None, NotFound()
        automatic = request.method == "OPTIONS" and getattr(rule, "provide_automatic_options", False)
        if rule is None or error is not None or automatic:
            return self._beyond_rules(request, error)
        return self._by_view(request, rule.endpoint, flask_request.view_args or {})

    def _by_view(self, request: Request, endpoint: str, arguments: dict[str, Any]) -> flask.Response:
        """By what stands in Flask's `view_functions`, where an application may put its own around, or in place of,
        any view."""
        view = self.view_functions[endpoint]
        if isinstance(view, View):
            return self.answer(request, view.handler)
        if not self._middleware:
            return self.make_response(self.ensure_sync(view)(**arguments))

        def flask_view(_: Request) -> Response:
            return to_response(self.make_response(self.ensure_sync(view)(**arguments)))

        return self.answer(request, flask_view)

    def answer(self, request: Request, handler: Handler) -> flask.Response:
        """Run a handler within a Flask context, where Flask's error handlers apply to what it raises."""

        def failed(error: Exception, _: Request) -> Response:
            return to_response(self.make_response(self.handle_user_exception(error)))

        return self.to_flask(run(self._middleware, handler, request, failed))

    def _beyond_rules(self, request: Request, error: HTTPException | None) -> flask.Response:
        """A pattern; or 405 or the answer to OPTIONS where the path is known under other methods; or 404."""
        if isinstance(error, RequestRedirect):
            raise error
        found = self._routes.pattern(request.method, request.path)
        if found is not None:
            route, match = found
            return self.answer(Request(request.environ, self.body_limit, match), route.handler)
        allowed = self._routes.allowed(request.path)
        if not isinstance(error, NotFound):
            adapter = flask.globals.request_ctx.url_adapter
            allowed |= set(adapter.allowed_methods()) if adapter is not None else set()
        if not allowed:
            raise NotFound()
        methods = sorted(allowed | {"OPTIONS"})
        if request.method == "OPTIONS":
            return self.answer(request, lambda _: Response(b"", 200, [("Allow", ", ".join(methods))]))
        raise MethodNotAllowed(methods)

    # The express lane

    def _by_express(self, handler: Handler, environ: WSGIEnvironment, observed: log.Observed) -> Iterable[bytes]:
        request = Request(environ, self.body_limit)
        try:
            response = run(self._middleware, handler, request, self._express_failure)
        except Exception as error:  # of a middleware's, or of an error handler's
            return observed.watch(self._last_failure(error, environ)(environ, observed.start_response))
        body = response.body
        if type(body) is not bytes:
            if type(body) is memoryview and not (body.c_contiguous and observed.sends_views(environ)):
                body = body.tobytes()
            if isinstance(body, (EventStream, HandlerEvents)) and response.is_simple:
                observed.start_response(status_line(response.status), list(response.header_list))
                return observed.watch(body)
            if not isinstance(body, (bytes, memoryview)):
                return observed.watch(self.to_flask(response)(environ, observed.start_response))
        if not response.is_simple:
            return observed.watch(self.to_flask(response)(environ, observed.start_response))
        size = body.nbytes if type(body) is memoryview else len(body)
        status, headers = status_line(response.status), [*response.header_list, ("Content-Length", str(size))]
        observed.start_response(status, headers)
        return observed.watch((body,))

    def _express_failure(self, error: Exception, request: Request) -> Response:
        if self._only_our_failures and not isinstance(error, HTTPException):
            return failure(error, request.id)
        with self.request_context(request.environ):
            answer = self.make_response(self.handle_user_exception(error))
            return to_response(self.process_response(answer))  # with what the error handler has put into the session

    @property
    def _only_our_failures(self) -> bool:
        """Whether no error handler is declared but the one of every `HttpServer`."""
        handlers = self.error_handler_spec
        only_one = sum(len(kinds) for codes in handlers.values() for kinds in codes.values()) == 1
        return only_one and handlers[None][None].get(Exception) == self._flask_failure

    def _last_failure(self, error: Exception, environ: WSGIEnvironment) -> flask.Response:
        with self.request_context(environ):
            try:
                return self.finalize_request(self.handle_user_exception(error))
            except Exception as worse:
                return self.handle_exception(worse)

    # Flask's side

    def _flask_failure(self, error: Exception) -> flask.Response:
        return self.to_flask(failure(error, Request(flask.request.environ, 0).id))

    def handle_http_exception(self, e: HTTPException) -> Any:
        if isinstance(e, RequestRedirect):  # as Flask answers it, without the page of HTML
            return self.to_flask(Response(b"", e.code or 308, [("Location", e.new_url)]))
        return super().handle_http_exception(e)

    def log_exception(self, exc_info: object) -> None:
        """Nothing: what gets here ends in `failure`, which logs it with the request's id."""

    def to_flask(self, response: Response) -> flask.Response:
        status = status_line(response.status)
        body = response.body.tobytes() if isinstance(response.body, memoryview) else response.body
        flask_response = self.response_class(body, status, direct_passthrough=False)
        flask_response.headers.clear()  # no default type: what the response does not say is not said
        flask_response.headers.extend(response.headers)
        if isinstance(body, bytes):
            flask_response.headers["Content-Length"] = str(len(body))
        return flask_response

    def _check_not_started(self, what: Route | str) -> None:
        if self._started:
            name = f"{what.method} {what.prefix}{what.path}" if isinstance(what, Route) else what
            raise RuntimeError(f"{name} is declared too late: the server has started, declare it before")


def _is_own(cls: type[HttpServer], step: str) -> bool:
    """Whether a step is done as Flask and we have written it: neither a subclass nor a tracer has put its own there."""
    value = getattr(cls, step)
    home = getattr(value, "__module__", "") or ""
    as_written = home.startswith(("flask.", "service.")) and not hasattr(value, "__wrapped__")
    return as_written and value is getattr(HttpServer, step)


class View:
    """A light handler as Flask's URL map holds it: a view function like any other. Called by what an application has
    put around it, within the middleware."""

    def __init__(self, server: HttpServer, route: Route) -> None:
        if any(mark in route.path for mark in "<>|"):
            raise ValueError(f"the fixed path {route.path!r} looks like a rule; declare it with pattern=True")
        self.handler = route.handler
        self._server = server

    def __call__(self) -> flask.Response:
        request = Request(flask.request.environ, self._server.body_limit)
        return self._server.to_flask(to_response(self.handler(request)))


class Blueprint(Declaring, flask.Blueprint):  # type: ignore[misc]  # as with HttpServer
    """A Flask blueprint of light handlers, to be registered on an `HttpServer`."""

    def declare(self, route: Route) -> None:
        self.record(lambda state: _register(state, route))

    @overload  # type: ignore[override]
    def route(self, method: str, path: str, handler: None = None, *, pattern: bool = False) -> Callable[[H], H]: ...
    @overload
    def route(self, method: str, path: str, handler: H, *, pattern: bool = False) -> H: ...
    def route(self, method: str, path: str, handler: H | None = None, *, pattern: bool = False) -> H | Callable[[H], H]:
        return self.on(method, path, handler, pattern=pattern)


def _register(state: BlueprintSetupState, route: Route) -> None:
    if not isinstance(state.app, HttpServer):
        raise TypeError("this blueprint is for an HttpServer")
    state.app.declare_on(state, route)


def _endpoint(route: Route) -> str:
    return f"{route.method} {route.path}".replace(".", "·")  # Flask reads a dot as blueprint.view

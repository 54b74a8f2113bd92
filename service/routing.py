"""Routes: which handler answers (method, path). Pure: no Flask, no request context, no I/O.

`HttpServer`, its groups and `Blueprint` share one way of declaring routes (`Declaring`); `Routes` finds them.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, overload

from service.request import Request
from service.response import Response, Returned, to_response

Handler = Callable[[Request], Returned]
H = TypeVar("H", bound=Handler)
Next = Callable[[Request], Response]
Middleware = Callable[[Request, Next], Returned]

_METHOD = re.compile(r"[A-Z]{3,20}")


@dataclass(frozen=True, slots=True)
class Route:
    """`regex` is that of a pattern route and must match the whole decoded path, or, in a group, what comes after the
    group's prefix."""

    method: str
    path: str
    handler: Handler
    regex: re.Pattern[str] | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if not _METHOD.fullmatch(self.method):
            raise ValueError(f"{self.method!r} is not an HTTP method")
        if self.regex is None and not self.path.startswith("/"):
            raise ValueError(f"the path {self.path!r} does not begin with '/'")
        if self.regex is None and not self.path.isprintable():
            raise ValueError(f"the path {self.path!r} is not printable")

    def match(self, path: str) -> re.Match[str] | None:
        """Whether this pattern answers `path`."""
        if self.regex is None or not path.startswith(self.prefix):
            return None
        return self.regex.fullmatch(path[len(self.prefix) :])


class Declaring(abc.ABC):
    """The declaring half of the embedding API: each form works as a decorator and as a call."""

    @abc.abstractmethod
    def declare(self, route: Route) -> None: ...

    @overload
    def get(self, path: str, handler: None = None) -> Callable[[H], H]: ...
    @overload
    def get(self, path: str, handler: H) -> H: ...
    def get(self, path: str, handler: H | None = None) -> H | Callable[[H], H]:
        return self.on("GET", path, handler)

    @overload
    def post(self, path: str, handler: None = None) -> Callable[[H], H]: ...
    @overload
    def post(self, path: str, handler: H) -> H: ...
    def post(self, path: str, handler: H | None = None) -> H | Callable[[H], H]:
        return self.on("POST", path, handler)

    def group(self, prefix: str) -> Group:
        """Routes under a common prefix."""
        return Group(self, prefix)

    def on(self, method: str, path: str, handler: H | None, *, pattern: bool = False) -> H | Callable[[H], H]:
        """What every `get`, `post` and `route` comes to."""

        def add(handler: H) -> H:
            self.declare(Route(method, path, handler, re.compile(path) if pattern else None))
            return handler

        return add if handler is None else add(handler)


class Group(Declaring):
    def __init__(self, parent: Declaring, prefix: str) -> None:
        if not prefix.startswith("/") or prefix.endswith("/"):
            raise ValueError(f"the prefix {prefix!r} must begin with '/' and not end with it")
        self._parent = parent
        self._prefix = prefix

    @overload
    def route(self, method: str, path: str, handler: None = None, *, pattern: bool = False) -> Callable[[H], H]: ...
    @overload
    def route(self, method: str, path: str, handler: H, *, pattern: bool = False) -> H: ...
    def route(self, method: str, path: str, handler: H | None = None, *, pattern: bool = False) -> H | Callable[[H], H]:
        return self.on(method, path, handler, pattern=pattern)

    def declare(self, route: Route) -> None:
        self._parent.declare(prefixed(self._prefix, route))


class Routes:
    """What has been declared: fixed paths in a dictionary, patterns in order of declaration."""

    def __init__(self) -> None:
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[Route] = []

    def add(self, route: Route) -> None:
        if route.regex is not None:
            self._patterns.append(route)
            return
        if (route.method, route.path) in self._fixed:
            raise ValueError(f"{route.method} {route.path} is declared twice")
        self._fixed[route.method, route.path] = route

    def fixed(self, method: str, path: str) -> Route | None:
        for declared in _answering(method):
            route = self._fixed.get((declared, path))
            if route is not None:
                return route
        return None

    def pattern(self, method: str, path: str) -> tuple[Route, re.Match[str]] | None:
        """The first pattern that matches."""
        for declared in _answering(method):
            for route in self._patterns:
                match = route.match(path) if route.method == declared else None
                if match is not None:
                    return route, match
        return None

    def allowed(self, path: str) -> set[str]:
        """The methods answered on this path, none when it is unknown."""
        methods = {method for method, fixed in self._fixed if fixed == path}
        methods |= {route.method for route in self._patterns if route.match(path) is not None}
        return methods | {"HEAD"} if "GET" in methods else methods


def _answering(method: str) -> tuple[str, ...]:
    """The methods whose routes answer a request: a HEAD for which nothing is declared is answered as its GET."""
    return ("HEAD", "GET") if method == "HEAD" else (method,)


def prefixed(prefix: str, route: Route) -> Route:
    """The same route under a prefix, which is literal also before a pattern."""
    if not prefix:
        return route
    if route.regex is None:
        return Route(route.method, prefix + route.path, route.handler)
    return Route(route.method, route.path, route.handler, route.regex, prefix + route.prefix)


def run(
    middleware: list[Middleware], handler: Handler, request: Request, failed: Callable[[Exception, Request], Response]
) -> Response:
    """The handler with every middleware around it, the first one outermost. What the handler raises is a response
    already, made by `failed`, when the middleware sees it."""

    if not middleware:
        try:
            return to_response(handler(request))
        except Exception as error:
            return failed(error, request)

    def innermost(request: Request) -> Response:
        try:
            return to_response(handler(request))
        except Exception as error:  # the one place where handlers' code is called
            return failed(error, request)

    call: Next = innermost
    for around in reversed(middleware):

        def step(request: Request, around: Middleware = around, following: Next = call) -> Response:
            return to_response(around(request, following))

        call = step
    return call(request)

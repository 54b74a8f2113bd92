"""The express lane: fixed routes that are answered before any Flask context exists.

Nothing that Flask would have applied is ever skipped: a request takes this lane only while there is no hook, no signal
receiver, no wrapper and no changed step of Flask's that would have had a part in it, which is asked anew each time,
for a hook may come late. Every other request goes through Flask, and is answered alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import flask
from flask.signals import (
    appcontext_popped,
    appcontext_pushed,
    appcontext_tearing_down,
    request_finished,
    request_started,
    request_tearing_down,
)

from service.routing import Handler, Route

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIEnvironment

STEPS = frozenset(
    {
        "app_context",
        "create_url_adapter",
        "dispatch_request",
        "do_teardown_appcontext",
        "do_teardown_request",
        "ensure_sync",
        "finalize_request",
        "full_dispatch_request",
        "handle_exception",
        "handle_http_exception",
        "handle_user_exception",
        "make_response",
        "preprocess_request",
        "process_response",
        "request_class",
        "request_context",
        "response_class",
        "session_interface",
        "trap_http_exception",
        "wsgi_app",
    }
)
"""What Flask does for a request, by the names under which an application may put its own in place."""

# What werkzeug makes nothing of. Others it may refuse, or read in its own way.
_HOST = re.compile(r"[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,15}(?::[0-9]{1,5})?")
_MAX_HOSTS = 1024


class Express:
    """The fixed routes of `app`, each with the names of the blueprints it belongs to."""

    def __init__(self, app: flask.Flask) -> None:
        self._app = app
        self._routes: dict[tuple[str, str], tuple[Handler, Sequence[str], str, object]] = {}
        self.changed = False
        """Whether a step of Flask's has been replaced on the application itself."""
        self._hosts = {"-"}  # that are plain, of those that were asked for last

    def add(self, route: Route, blueprints: Sequence[str], endpoint: str, view: object) -> None:
        """A fixed route, with the view that stands for it in Flask's `view_functions`."""
        if route.path.isascii() and route.method != "HEAD":  # whose body is taken away
            self._routes[route.method, route.path] = route.handler, blueprints, endpoint, view

    def handler(self, environ: WSGIEnvironment) -> Handler | None:
        """Who answers the request; None if Flask has to."""
        found = self._routes.get((environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")))
        if found is None or self.changed or environ.get("SCRIPT_NAME") or "HTTP_UPGRADE" in environ:
            return None
        if "werkzeug.debug.preserve_context" in environ:  # a test client or a debugger wants to look at the context
            return None
        handler, blueprints, endpoint, view = found
        app = self._app
        config = app.config
        if (
            ((host := environ.get("HTTP_HOST", "-")) not in self._hosts and not self._is_plain(host))
            or config["TRUSTED_HOSTS"] is not None
            or config["SERVER_NAME"] is not None
            or app.subdomain_matching
            or app.url_map.host_matching
            or ("HTTP_COOKIE" in environ and app.secret_key)  # a session, which Flask may have to renew
            or app.view_functions.get(endpoint) is not view
            or app.teardown_appcontext_funcs
            or (app.before_request_funcs and _apply(app.before_request_funcs, blueprints))
            or (app.after_request_funcs and _apply(app.after_request_funcs, blueprints))
            or (app.teardown_request_funcs and _apply(app.teardown_request_funcs, blueprints))
            or (app.url_value_preprocessors and _apply(app.url_value_preprocessors, blueprints))
            or request_started.receivers
            or request_finished.receivers
            or request_tearing_down.receivers
            or appcontext_pushed.receivers
            or appcontext_popped.receivers
            or appcontext_tearing_down.receivers
        ):
            return None
        return handler

    def _is_plain(self, host: str) -> bool:
        if _HOST.fullmatch(host) is None:
            return False
        if len(self._hosts) >= _MAX_HOSTS:
            self._hosts.clear()
        self._hosts.add(host)
        return True


def _apply(hooks: Mapping[Any, Any], blueprints: Sequence[str]) -> bool:
    return bool(hooks.get(None)) or any(hooks.get(name) for name in blueprints)


def names_of(blueprint: str) -> tuple[str, ...]:
    """A blueprint's name with those of the blueprints it is nested in: Flask joins them by dots."""
    parts = blueprint.split(".")
    return tuple(".".join(parts[:end]) for end in range(len(parts), 0, -1))

"""The web tier: HTTP in, tensors to the pool, the answer out.

The names below are imported on first use. The gunicorn master imports this package for its settings and must not
load the application with it: what the master has loaded, the web processes forked after a HUP would still run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.app import create_app
    from service.http_client import get_text, post_text
    from service.request import Request
    from service.response import Response
    from service.server import HttpServer

__all__ = ["HttpServer", "Request", "Response", "create_app", "get_text", "post_text"]

_HOME = {
    "HttpServer": "service.server",
    "Request": "service.request",
    "Response": "service.response",
    "create_app": "service.app",
    "get_text": "service.http_client",
    "post_text": "service.http_client",
}


def __getattr__(name: str) -> object:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module 'service' has no attribute {name!r}") from None
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value

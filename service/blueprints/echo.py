"""`POST /echo`: the body back, byte for byte."""

from __future__ import annotations

from service.request import Request
from service.server import Blueprint


def blueprint() -> Blueprint:
    routes = Blueprint("echo", __name__)

    @routes.post("/echo")
    def echo(request: Request) -> bytes:
        return request.body

    return routes

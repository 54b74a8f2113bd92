"""`GET /generate` and `GET /events`: what the model named `tokens` says, piece by piece, as server-sent events."""

from __future__ import annotations

from service.client import PoolClient
from service.request import Request
from service.response import Response
from service.server import Blueprint

MODEL = "tokens"


def blueprint(client: PoolClient) -> Blueprint:
    routes = Blueprint("generate", __name__)

    @routes.get("/events")
    @routes.get("/generate")
    def generate(request: Request) -> Response:
        return Response.stream(request, lambda caller: client.stream(MODEL, {}, caller=caller))

    return routes

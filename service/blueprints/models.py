"""`GET /models/<name>`: whether a model is loaded."""

from __future__ import annotations

from service.client import PoolClient
from service.errors import HttpError
from service.request import Request
from service.server import Blueprint
from workers.errors import PoolLost
from workers.status import State


def blueprint(client: PoolClient) -> Blueprint:
    routes = Blueprint("models", __name__)

    @routes.route("GET", r"/models/(?P<name>(?!select\Z)[^/]+)", pattern=True)
    def model(request: Request) -> dict[str, object]:
        name = request.param("name")
        try:
            status = client.statuses().get(name)
        except PoolLost:
            status = None
        return {"model": name, "loaded": status is not None and status.state is State.READY}

    @routes.post("/models/select")
    def select(_: Request) -> None:
        raise HttpError(501, "selecting a model is not supported")

    return routes

"""`GET /health`: this web process lives. `GET /ready`: every model that should serve does."""

from __future__ import annotations

from collections.abc import Mapping

from service.client import PoolClient
from service.request import Request
from service.response import Response
from service.server import Blueprint
from workers.errors import PoolLost
from workers.status import ModelStatus, State


def blueprint(client: PoolClient, version: str) -> Blueprint:
    routes = Blueprint("health", __name__)

    @routes.get("/health")
    def health(_: Request) -> dict[str, str]:
        return {"status": "ok", "runtime": version}

    @routes.get("/ready")
    def ready(_: Request) -> Response:
        try:
            statuses = client.statuses()
        except PoolLost:
            return _not_ready({})
        if all(_holds_nothing_back(status) for status in statuses.values()):
            return Response.json({"status": "ready", "models": _models(statuses)})
        return _not_ready(statuses)

    return routes


def _holds_nothing_back(status: ModelStatus) -> bool:
    return status.state in (State.READY, State.REFUSED)


def _not_ready(statuses: Mapping[str, ModelStatus]) -> Response:
    return Response.json({"error": "not ready", "code": "NOT_READY", "models": _models(statuses)}, status=503)


def _models(statuses: Mapping[str, ModelStatus]) -> dict[str, dict[str, str]]:
    models = {}
    for name, status in statuses.items():
        models[name] = {"state": status.state.value, "reason": status.reason}
        if status.code:
            models[name]["code"] = status.code
    return models

"""Headrace with routes besides its own: an ordinary Flask view, one over any model by its name, and streams."""

from __future__ import annotations

import flask
import numpy as np

from service import Request, Response, create_app
from service.connect import LazyClient
from workers.codecs import CODECS

CODEC = CODECS["json-row"]

pool = LazyClient()
server = create_app(pool)


@server.route("/flask", methods=["POST"])
def flask_view() -> flask.Response:
    row = flask.request.get_json()["features"]
    outputs = pool.predict("score", {"features": np.array([row], np.float32)})
    return flask.jsonify(scores=outputs["scores"][0].tolist())


@server.route("POST", r"/predict/(?P<name>[^/]+)", pattern=True)
def predict(request: Request) -> Response:
    name = request.param("name")
    status = pool.admit(name)
    outputs = pool.predict(name, CODEC.decode(request.body, status.inputs))
    return Response.bytes(CODEC.encode(outputs, status.outputs), CODEC.content_type)


def stream_of(model: str) -> None:
    @server.get(f"/{model}")
    def stream(request: Request) -> Response:
        return Response.stream(request, lambda caller: pool.stream(model, {}, caller=caller))


for model in ("ticks", "idle", "endless"):
    stream_of(model)

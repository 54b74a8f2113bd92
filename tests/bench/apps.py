"""Headrace with two routes besides its own: an ordinary Flask view, and one route over any model by its name."""

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

"""The application of these tests: the built-in routes, every model of the pool by its name, and streams.

`POST /predict/<model>` takes and gives one row as JSON, as `/score` does for its model; large bodies go to compute.
`GET /ticks` streams what the model `ticks` says, from the hub; `/flask/ticks` goes through Flask, and is iterated over.
Each answer names the process that gave it in `X-Pid`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from service import Request, Response, create_app
from service.blueprints.score import CODEC, DECODED_HERE
from service.connect import LazyClient
from service.hub import HubClient
from tests.e2e.models import Ticks

pool = LazyClient()
server = create_app(client=pool)


@server.use
def name_the_process(request: Request, answer: Callable[[Request], Response]) -> Response:
    response = answer(request)
    response.headers["X-Pid"] = str(os.getpid())
    return response


@server.route("POST", r"/predict/(?P<model>[^/]+)", pattern=True)
def predict(request: Request) -> Response:
    model = request.param("model")
    status = pool.admit(model)
    caller = request.environ.get("gunicorn.socket")
    if len(request.body) > DECODED_HERE:
        body = pool.predict_body(model, request.body, CODEC.name, caller=caller)
        return Response.bytes(body, CODEC.content_type)
    outputs = pool.predict(model, CODEC.decode(request.body, status.inputs), caller=caller)
    return Response.bytes(CODEC.encode(outputs, status.outputs), CODEC.content_type)


def ticks(request: Request) -> Response:
    told = request.query
    inputs = {spec.name: np.array([int(told.get(spec.name, "0"))]) for spec in Ticks.inputs}
    return Response.stream(request, lambda caller: pool.stream("ticks", inputs, caller=caller))


server.get("/ticks", ticks)
server.route("GET", "/flask/ticks", ticks, pattern=True)


@server.get("/slots")
def slots(_: Request) -> dict[str, int]:
    """How many slots of this process's arena are out, and how many tasks have no final frame."""
    client = pool._get()
    assert isinstance(client, HubClient)
    connection = client._live()
    assert connection.core is not None
    return {"leased": connection.core.leased, "under_way": connection.core.under_way}

"""`POST /score`: one row of numbers through the model named `score`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from service.client import PoolClient
from service.request import Request
from service.response import Response
from service.server import Blueprint
from workers.codecs import CODECS
from workers.model import TensorSpec
from workers.status import ModelStatus

MODEL = "score"
CODEC = CODECS["json-row"]

# Parsing and writing more would keep this process from its other requests; a worker does it.
DECODED_HERE = 64 * 1024
NUMBERS_HERE = 1024


def blueprint(client: PoolClient) -> Blueprint:
    routes = Blueprint("score", __name__)
    known: tuple[ModelStatus | None, bool] = None, False  # the model's last status, and whether its rows are small

    @routes.post("/score")
    def score(request: Request) -> Response:
        nonlocal known
        status = client.admit(MODEL)  # a full queue is told before the body is read
        if status is not known[0]:
            known = status, _is_small(status.inputs) and _is_small(status.outputs)
        deadline = time.monotonic() + status.timeout_s  # also a body that is long in coming takes from it
        body, caller = request.plain_body, request.environ.get("gunicorn.socket")
        if len(body) > DECODED_HERE or not known[1]:
            answer = client.predict_body(MODEL, body, CODEC.name, deadline=deadline, caller=caller)
        else:
            inputs = CODEC.decode(body, status.inputs)
            outputs = client.predict(MODEL, inputs, deadline=deadline, caller=caller)
            answer = CODEC.encode(outputs, status.outputs)
        return Response.bytes(answer, CODEC.content_type)

    return routes


def _is_small(specs: Sequence[TensorSpec]) -> bool:
    """Whether a row is known beforehand to hold few numbers."""
    fixed = all(length != -1 for spec in specs for length in spec.shape)
    return fixed and sum(math.prod(spec.shape) for spec in specs) <= NUMBERS_HERE

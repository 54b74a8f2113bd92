"""`POST /score`: one row of numbers through the model named `score`."""

from __future__ import annotations

from service.client import PoolClient
from service.request import Request
from service.response import Response
from service.server import Blueprint
from workers.codecs import CODECS

MODEL = "score"
CODEC = CODECS["json-row"]

# Parsing and writing bigger bodies would keep this process from its other requests; a worker does it.
DECODED_HERE = 64 * 1024


def blueprint(client: PoolClient) -> Blueprint:
    routes = Blueprint("score", __name__)

    @routes.post("/score")
    def score(request: Request) -> Response:
        status = client.admit(MODEL)  # a full queue is told before the body is read
        body, caller = request.plain_body, request.environ.get("gunicorn.socket")
        if len(body) > DECODED_HERE:
            answer = client.predict_body(MODEL, body, CODEC.name, caller=caller)
        else:
            outputs = client.predict(MODEL, CODEC.decode(body, status.inputs), caller=caller)
            answer = CODEC.encode(outputs, status.outputs)
        return Response.bytes(answer, CODEC.content_type)

    return routes

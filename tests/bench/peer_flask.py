"""A peer: Flask on gunicorn's gevent worker, which computes, or only sleeps, in the web process."""

from __future__ import annotations

import time
from collections.abc import Iterator

from flask import Flask, Response, jsonify, request

from tests.bench.score import score
from tests.bench.ticks import EVENTS, PACE_S

app = Flask(__name__)


@app.post("/score")
def post_score() -> Response:
    return jsonify(scores=score(request.get_json()["features"]))


@app.get("/ticks")
def ticks() -> Response:
    def events() -> Iterator[str]:
        for number in range(1, EVENTS + 1):
            yield f"event: token\ndata: piece {number} \n\n"
            time.sleep(PACE_S)

    return Response(events(), mimetype="text/event-stream")


@app.get("/endless")
def endless() -> Response:
    def events() -> Iterator[str]:
        while True:
            yield "event: token\ndata: piece \n\n"
            time.sleep(PACE_S)

    return Response(events(), mimetype="text/event-stream")

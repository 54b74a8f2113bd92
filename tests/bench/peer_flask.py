"""A peer: Flask on gunicorn's gevent worker, which computes in the web process."""

from __future__ import annotations

from flask import Flask, Response, jsonify, request

from tests.bench.score import score

app = Flask(__name__)


@app.post("/score")
def post_score() -> Response:
    return jsonify(scores=score(request.get_json()["features"]))

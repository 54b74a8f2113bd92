"""The built-in routes over a stub of the pool: statuses, bodies to the byte, and no HTML anywhere."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from flask.testing import FlaskClient

from service import create_app
from service.version import runtime_version
from tests.service.stub import StubClient, status
from workers import errors
from workers.model import TensorSpec
from workers.status import State


@pytest.fixture
def pool() -> StubClient:
    return StubClient()


@pytest.fixture
def http(pool: StubClient) -> FlaskClient:
    return create_app(client=pool).test_client()


def test_health_tells_the_version_and_needs_no_pool(http: FlaskClient, pool: StubClient) -> None:
    pool.lost = errors.PoolLost("no pool")
    answer = http.get("/health")
    assert answer.status_code == 200
    assert answer.data == b'{"status":"ok","runtime":"%b"}' % runtime_version().encode()
    assert answer.headers["Content-Type"] == "application/json"


def test_ready_lists_the_models(http: FlaskClient) -> None:
    answer = http.get("/ready")
    assert answer.status_code == 200
    assert answer.data == b'{"status":"ready","models":{"score":{"state":"ready","reason":""}}}'


@pytest.mark.parametrize("state", [State.LOADING, State.RESTARTING, State.CRASH_LOOPED, State.DRAINING])
def test_ready_is_503_with_the_reason_while_a_model_does_not_serve(state: State) -> None:
    answer = create_app(client=StubClient(status(state=state, reason="why"))).test_client().get("/ready")
    assert answer.status_code == 503
    models = {"score": {"state": state.value, "reason": "why"}}
    assert answer.get_json() == {"error": "not ready", "code": "NOT_READY", "models": models}


def test_a_model_that_refuses_is_listed_with_its_code_and_does_not_hold_readiness_back() -> None:
    refused = status("other", State.REFUSED, reason="a licence is needed", code="LICENSE_FAILED")
    answer = create_app(client=StubClient(status(), refused)).test_client().get("/ready")
    assert answer.status_code == 200
    models = answer.get_json()["models"]
    assert models["other"] == {"state": "refused", "reason": "a licence is needed", "code": "LICENSE_FAILED"}


def test_ready_is_503_without_a_pool(http: FlaskClient, pool: StubClient) -> None:
    pool.lost = errors.PoolLost("no pool")
    answer = http.get("/ready")
    assert answer.status_code == 503
    assert answer.data == b'{"error":"not ready","code":"NOT_READY","models":{}}'


@pytest.mark.parametrize("body", [b"", b"\0\x01\xff", b"x" * 100_000])
def test_echo_gives_the_body_back(http: FlaskClient, body: bytes) -> None:
    answer = http.post("/echo", data=body)
    assert (answer.status_code, answer.data) == (200, body)
    assert answer.headers["Content-Type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/models/score", b'{"model":"score","loaded":true}'),
        ("/models/unknown", b'{"model":"unknown","loaded":false}'),
        ("/models/se%20lect", b'{"model":"se lect","loaded":false}'),
        ("/models/%C3%BC", '{"model":"ü","loaded":false}'.encode()),
        ("/models/select%0A", b'{"model":"select\\n","loaded":false}'),
        ("/models/selected", b'{"model":"selected","loaded":false}'),
    ],
)
def test_a_model_is_loaded_or_not(http: FlaskClient, path: str, body: bytes) -> None:
    assert http.get(path).data == body


@pytest.mark.parametrize("path", ["/models/a/b", "/models/a%2Fb", "/models/", "/nope", "//health", "/health/"])
def test_paths_nobody_declared_are_404_in_json(http: FlaskClient, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404
    assert answer.data == b'{"error":"not found"}'
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/health", "GET, HEAD, OPTIONS"),
        ("GET", "/score", "OPTIONS, POST"),
        ("HEAD", "/score", "OPTIONS, POST"),
        ("DELETE", "/echo", "OPTIONS, POST"),
        ("POST", "/models/score", "GET, HEAD, OPTIONS"),
        ("GET", "/models/select", "OPTIONS, POST"),
    ],
)
def test_a_method_that_is_not_allowed_is_told_which_are(http: FlaskClient, method: str, path: str, allow: str) -> None:
    answer = http.open(path, method=method)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allow)
    assert answer.data == (b"" if method == "HEAD" else b'{"error":"method not allowed"}')


@pytest.mark.parametrize("path", ["/health", "/ready", "/models/score"])
def test_head_answers_as_get_without_a_body(http: FlaskClient, path: str) -> None:
    get, head = http.get(path), http.head(path)
    assert (head.status_code, head.data) == (get.status_code, b"")
    assert head.headers["Content-Length"] == str(len(get.data))


@pytest.mark.parametrize(("path", "allow"), [("/health", "GET, HEAD, OPTIONS"), ("/models/x", "GET, HEAD, OPTIONS")])
def test_options_tells_the_methods_and_sends_no_html(http: FlaskClient, path: str, allow: str) -> None:
    answer = http.options(path)
    assert (answer.status_code, answer.headers["Allow"], answer.data) == (200, allow, b"")
    assert "Content-Type" not in answer.headers


def test_score_scores(http: FlaskClient) -> None:
    answer = http.post("/score", data=b'{"features":[1,2,3,4]}')
    assert (answer.status_code, answer.data) == (200, b'{"scores":[5.25,5.25]}')
    assert answer.headers["Content-Type"] == "application/json"


def test_scores_are_the_shortest_text_of_the_float32(http: FlaskClient) -> None:
    assert http.post("/score", data=b'{"features":[1.01,0,0,0]}').data == b'{"scores":[0.755,0.755]}'


MISFIT = "'features' must hold 4 numbers"
MALFORMED = [
    b"",
    b"{",
    b"nan",
    b'{"features":[NaN,1,1,1]}',
    b'{"features":[1e999,1,1,1]}',
    b'{"features":[1,2,3,4],"features":[1,2,3,4]}',
    b'{"a":"\\ud800"}',
    '{"features":[1,2,3,4]}'.encode("utf-16"),
    b'\xef\xbb\xbf{"features":[1,2,3,4]}',
    b'{"a":"\xff"}',
    b"[" * 100_000,
]
MISFITS = [
    b"{}",
    b"[]",
    b"null",
    b"3",
    b'"a"',
    b'{"features":3}',
    b'{"features":null}',
    b'{"features":[1,2,3]}',
    b'{"features":[1,2,3,4,5]}',
    b'{"features":[1,2,3,"4"]}',
    b'{"features":[1,2,3,true]}',
    b'{"features":[1,2,3,null]}',
    b'{"features":[1,2,3,[4]]}',
    b'{"features":[1,2,3,1e39]}',
]


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_not_strictly_json_is_400(http: FlaskClient, body: bytes) -> None:
    answer = http.post("/score", data=body)
    assert (answer.status_code, answer.data) == (400, b'{"error":"invalid json"}')


@pytest.mark.parametrize("body", MISFITS, ids=lambda body: body.decode())
def test_features_that_are_not_4_numbers_are_400(http: FlaskClient, body: bytes) -> None:
    answer = http.post("/score", data=body)
    assert answer.status_code == 400
    assert answer.data == json.dumps({"error": MISFIT}, separators=(",", ":")).encode()


def test_an_answer_that_overflows_is_422(http: FlaskClient) -> None:
    answer = http.post("/score", data=b'{"features":[3e38,3e38,3e38,3e38]}')
    assert answer.status_code == 422
    assert answer.get_json()["code"] == "INVALID_OUTPUT"


def test_a_body_over_64_kib_is_parsed_in_compute(http: FlaskClient, pool: StubClient) -> None:
    body = b'{"features":[1,2,3,4]}'
    assert http.post("/score", data=body + b" " * (64 * 1024 - len(body))).status_code == 200
    assert pool.bodies == []
    answer = http.post("/score", data=body + b" " * (64 * 1024 - len(body) + 1))
    assert (answer.data, pool.bodies) == (b'{"scores":[5.25,5.25]}', ["json-row"])


@pytest.mark.parametrize(
    ("inputs", "outputs", "here"),
    [((4,), (2,), True), ((4,), (1024,), True), ((4,), (-1,), False), ((4,), (1025,), False), ((-1,), (2,), False)],
)
def test_a_row_that_is_not_known_to_be_small_is_parsed_and_written_in_compute(
    inputs: tuple[int], outputs: tuple[int], here: bool
) -> None:
    shapes = {
        "inputs": (TensorSpec("features", "float32", inputs),),
        "outputs": (TensorSpec("scores", "float32", outputs),),
    }
    pool = StubClient(dataclasses.replace(status(), **shapes))
    answer = create_app(client=pool).test_client().post("/score", data=b'{"features":[1,2,3,4]}')
    assert (answer.data, pool.bodies == []) == (b'{"scores":[5.25,5.25]}', here)


FAILURES = [
    (errors.ModelNotFound("no"), 404),
    (errors.TooLarge("no"), 413),
    (errors.InvalidOutput("no"), 422),
    (errors.Overloaded("no"), 429),
    (errors.ModelFailed("no"), 500),
    (errors.WorkerDied("no"), 500),
    (errors.NotReady("no"), 503),
    (errors.Draining("no"), 503),
    (errors.PoolLost("no"), 503),
    (errors.DeadlineExceeded("no"), 504),
    (errors.Refused("no", "LICENSE_FAILED"), 403),
]


@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=lambda value: getattr(value, "code", value))
def test_each_failure_has_its_status_and_code(
    http: FlaskClient, pool: StubClient, error: errors.PoolError, expected: int
) -> None:
    pool.prediction = error
    answer = http.post("/score", data=b'{"features":[1,2,3,4]}')
    assert answer.status_code == expected
    assert answer.data == b'{"error":"no","code":"%b"}' % error.code.encode()
    assert ("Retry-After" in answer.headers) == (expected == 429)


def test_a_full_queue_answers_429_before_the_body_is_looked_at(http: FlaskClient, pool: StubClient) -> None:
    pool.admission = errors.Overloaded("the queue of score is full")
    answer = http.post("/score", data=b"not json", headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert answer.get_json() == {"error": "the queue of score is full", "code": "OVERLOADED"}


def test_an_unforeseen_failure_is_500_and_only_the_log_says_more(
    http: FlaskClient, pool: StubClient, caplog: pytest.LogCaptureFixture
) -> None:
    pool.prediction = ZeroDivisionError("secret")
    answer = http.post("/score", data=b'{"features":[1,2,3,4]}', headers={"X-Request-ID": "abc.1"})
    assert (answer.status_code, answer.data) == (500, b'{"error":"internal error"}')
    assert "request abc.1 failed" in caplog.text
    assert "secret" in caplog.text


def test_an_encoded_body_is_415_where_it_is_to_be_understood(http: FlaskClient) -> None:
    answer = http.post("/score", data=b"x", headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.headers["Accept-Encoding"]) == (415, "identity")
    assert answer.get_json() == {"error": "Content-Encoding 'gzip' is not supported"}
    for encoding in ("identity", "gzip"):
        assert http.post("/echo", data=b"x", headers={"Content-Encoding": encoding}).data == b"x"


def test_a_body_over_the_limit_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_BODY_LIMIT", "10")
    http = create_app(client=StubClient()).test_client()
    assert http.post("/echo", data=b"x" * 10).data == b"x" * 10
    answer = http.post("/echo", data=b"x" * 11)
    assert answer.status_code == 413
    assert answer.get_json() == {"error": "the body is larger than 10 bytes", "code": "TOO_LARGE"}


def test_the_request_id_is_taken_when_sane_and_made_when_not(http: FlaskClient) -> None:
    assert http.get("/health", headers={"X-Request-ID": "a-B_9."}).headers["X-Request-ID"] == "a-B_9."
    for insane in ("a b", "x" * 129, "ü", "<script>"):
        made = http.get("/nope", headers={"X-Request-ID": insane}).headers["X-Request-ID"]
        assert made != insane
        assert len(made) == 16


def test_each_request_has_one_line_in_the_log(http: FlaskClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headrace.request"):
        http.get("/health", headers={"X-Request-ID": "r1"}).close()
        http.post("/nope%0Aforged", headers={"X-Request-ID": "r2"}).close()
    first, second = (record.getMessage() for record in caplog.records if record.name == "headrace.request")
    assert first.startswith("GET /health -> 200 ")
    assert first.endswith(" ms r1")
    assert second.startswith("POST /nope\\nforged -> 404 ")

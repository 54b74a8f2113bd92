"""Streams and scores through nginx, as deployed with `deploy/nginx.conf` and as it is by default."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from service import gunicorn_conf
from service.config import Settings
from service.sse import TOKENS
from tests.e2e.browser import Browser
from tests.e2e.nginx import BARE, SHIPPED, nginx
from tests.e2e.playing import END, FAREWELL, WAYS, Playhouse, fail
from tests.e2e.stack import ask, head
from tests.service.serving import Client
from tests.service.sse_client import StreamClient
from workers.config import ModelConfig

FAILURE = b'event: error\ndata: {"error":"out of tensors","code":"MODEL_FAILED"}\n\n'
GOOD = b'{"features":[1,2,3,4]}'


@pytest.fixture(scope="module", params=[SHIPPED, BARE], ids=["deploy/nginx.conf", "defaults"])
def port(request: pytest.FixtureRequest, house: Playhouse) -> Iterator[int]:
    """The proxy's."""
    with nginx(request.param, house.port) as port:
        yield port


@pytest.mark.parametrize("way", WAYS)
def test_each_event_passes_before_the_next_is_made(house: Playhouse, port: int, way: str) -> None:
    script = house.script()
    before = house.told()[1]
    with StreamClient(port, script.at(way), "Connection: close") as client:
        for number in range(1, 6):
            script.add(f"piece {number} ")
            frame = TOKENS.frame(f"piece {number} ")
            assert client.until(frame).endswith(frame)
            assert house.told()[1] - before == number
        script.add(END)
        assert client.finish() == b"".join(TOKENS.frame(f"piece {number} ") for number in range(1, 6))
        assert client.whole
        assert (client.status, client.headers["content-type"]) == (200, "text/event-stream")
    house.until_free()


def leave_by_close(client: StreamClient) -> None:
    client.socket.close()


def leave_by_reset(client: StreamClient) -> None:
    client.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pieces", [(), ("a",)], ids=["before the first event", "between events"])
@pytest.mark.parametrize("leave", [leave_by_close, leave_by_reset])
def test_a_client_that_leaves_frees_the_slot(
    house: Playhouse, port: int, way: str, pieces: tuple[str, ...], leave: Callable[[StreamClient], None]
) -> None:
    script = house.script(*pieces)
    with StreamClient(port, script.at(way)) as client:
        for piece in pieces:
            client.until(TOKENS.frame(piece))
        house.until_live()
        leave(client)
        house.until_free()


def test_scores_pass_and_keep_their_connection(port: int) -> None:
    with Client(port) as client:
        for _ in range(20):
            status, headers, body = ask(client, "/score", GOOD, "X-Request-ID: mine")
            assert (status, body) == (200, b'{"scores":[5.25,5.25]}')
            assert (headers["content-type"], headers["x-request-id"]) == ("application/json", "mine")


def test_errors_keep_their_status_and_their_body(house: Playhouse, port: int) -> None:
    with Client(port) as client:
        assert ask(client, "/score", b"{")[::2] == (400, b'{"error":"invalid json"}')
        assert ask(client, "/nope")[::2] == (404, b'{"error":"not found"}')
        assert ask(client, "/score")[::2] == (405, b'{"error":"method not allowed"}')
        for way in WAYS:
            early = ask(client, house.script(fail("out of tensors")).at(way))
            assert early[::2] == (500, b'{"error":"out of tensors","code":"MODEL_FAILED"}')
            assert early[1]["content-type"] == "application/json"


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_that_fails_later_says_why(house: Playhouse, port: int, way: str) -> None:
    with StreamClient(port, house.script("a", fail("out of tensors")).at(way), "Connection: close") as client:
        assert client.finish() == TOKENS.frame("a") + FAILURE
        assert client.whole


def test_a_browser_behind_it_goes_on_where_it_was(house: Playhouse, port: int, browser: Browser) -> None:
    script = house.script("a", "b", END, "c")
    browser.open(f"http://127.0.0.1:{port}/page")
    browser.listen(script.at("/numbered"))
    assert browser.until_seen(3) == [["token", text, str(number)] for number, text in enumerate("abc", 1)]
    script.add(FAREWELL, END)
    browser.until_done()
    assert browser.seen()[3:] == [["token", FAREWELL, "over"]]


# `deploy/nginx.conf` itself


def setting(name: str) -> int:
    (value,) = re.findall(rf"^ *{name} (\d+)[sm]?;", SHIPPED, re.MULTILINE)
    return int(value)


def test_what_it_says_fits_the_defaults_of_the_service() -> None:
    assert setting("proxy_read_timeout") >= 3 * Settings().heartbeat
    assert setting("proxy_read_timeout") > ModelConfig("any", "a:Model").timeout_s
    assert setting("client_max_body_size") * 2**20 == Settings().body_limit
    assert f"server {Settings().bind};" in SHIPPED


def test_it_closes_idle_connections_before_the_service_does() -> None:
    assert setting("keepalive_timeout") < gunicorn_conf.keepalive


def test_what_nginx_answers_by_itself_is_json(house: Playhouse) -> None:
    with nginx(SHIPPED, house.port, errors=True) as port, Client(port) as client:
        client.send(head("/score", Settings().body_limit + 1))
        status, headers, body = client.response()
        assert (status, headers["content-type"], json.loads(body)["code"]) == (413, "application/json", "TOO_LARGE")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with nginx(SHIPPED, nobody.getsockname()[1], errors=True) as port, Client(port) as client:
            status, headers, body = ask(client, "/score", GOOD)
            assert (status, headers["content-type"]) == (502, "application/json")
            assert json.loads(body)["error"]
    impatient = SHIPPED.replace("proxy_read_timeout 60s", "proxy_read_timeout 100ms")
    with nginx(impatient, house.port, errors=True) as port, Client(port) as client:
        status, headers, body = ask(client, house.script().at("/played"))
        assert (status, headers["content-type"]) == (504, "application/json")
        assert json.loads(body)["error"]
        house.until_free()  # nginx has left


def test_a_body_within_the_limit_of_the_service_passes(house: Playhouse) -> None:
    with nginx(SHIPPED, house.port) as port, Client(port) as client:
        body = b" " * 2_000_000  # nginx's own limit is half of that
        assert ask(client, "/score", body)[::2] == (400, b'{"error":"invalid json"}')

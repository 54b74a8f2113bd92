"""The two helpers for scripts, and the pool client that each process makes for itself."""

from __future__ import annotations

import os

import pytest

from service import connect, get_text, post_text
from service.http_client import StatusError
from tests.service.serving import gunicorn
from tests.service.stub import StubClient
from workers.errors import PoolLost


def test_get_text_and_post_text_return_the_body_and_raise_on_errors() -> None:
    with gunicorn() as served:
        url = f"http://127.0.0.1:{served.port}"
        assert "pid" in get_text(f"{url}/pid")
        assert post_text(f"{url}/echo", "ü") == "ü"
        assert post_text(f"{url}/echo", b"") == ""
        with pytest.raises(StatusError, match=r"^404 Not Found on POST /nope$") as raised:
            post_text(f"{url}/nope?q=1", b"x")
        assert (raised.value.status, raised.value.body) == (404, '{"error":"not found"}')


def test_the_client_is_made_on_first_use_and_anew_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StubClient] = []

    def make() -> connect.Connecting:
        made.append(StubClient())
        return made[-1]

    monkeypatch.setattr(connect, "make_client", make)
    lazy = connect.LazyClient()
    assert made == []
    lazy.statuses()
    lazy.admit("score")
    assert [client.started for client in made] == [True]
    child = os.fork()
    if child == 0:
        lazy.statuses()
        lazy.statuses()
        connect.close_clients()
        os._exit([client.closed for client in made] != [False, True])
    assert os.waitpid(child, 0)[1] == 0
    lazy.statuses()
    connect.close_clients()
    assert [client.closed for client in made] == [True]


def test_without_any_pool_every_use_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_POOL_SOCKET", raising=False)
    monkeypatch.setattr("workers.launch.current", lambda: None)
    with pytest.raises(PoolLost, match="HEADRACE_POOL_SOCKET"):
        connect.LazyClient().statuses()

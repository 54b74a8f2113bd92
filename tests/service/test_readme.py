"""The server that the README tells a newcomer to write, served as the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.serving import ROOT, Served, gunicorn
from tests.service.sse_client import StreamClient
from workers import ThreadClient


@pytest.fixture
def pool_socket(tmp_path: Path) -> Iterator[str]:
    """A pool with the packaged configuration."""
    path = str(tmp_path / "pool.sock")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-m", "workers"]
    with subprocess.Popen(command, cwd=ROOT, env={**environ, "HEADRACE_POOL_SOCKET": path}) as process:
        try:
            with ThreadClient(path) as client:
                client.wait_ready()
            yield path
        finally:
            process.terminate()


def test_the_server_of_the_readme_works_as_it_is_written(tmp_path: Path, pool_socket: str) -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Write a route\n")[2].partition("\n## ")[0]
    code = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert code is not None
    (tmp_path / "my_server.py").write_text(code[1])
    flags = ("-c", "python:service.gunicorn_conf")
    with gunicorn("my_server:server", *flags, cwd=tmp_path, env={"HEADRACE_POOL_SOCKET": pool_socket}) as served:
        with served.connect() as client:
            status, headers, body = client.get("/hello?name=you")
            assert (status, headers["x-served-by"], body) == (200, "my server", b'{"hello":"you"}')
            assert client.get("/squares/12")[::2] == (200, b"144")
            assert client.get("/squares/x")[0] == 404
            assert client.get("/health")[0] == 200
        assert posted(served, b"[1,2,3,4]") == (200, b'{"best":5.25}')
        assert posted(served, b"[1]") == (400, b'{"error":"a list of 4 numbers is needed"}')
        assert b"event: number\ndata: 2\n\n" in served.get("/count")
        with StreamClient(served.port, "/words") as words:
            assert words.finish().endswith(b"event: token\ndata: one.\n\n")
            assert words.headers["x-served-by"] == "my server"


def posted(served: Served, body: bytes) -> tuple[int, bytes]:
    with served.connect() as client:
        client.send(b"POST /best HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return client.response()[::2]

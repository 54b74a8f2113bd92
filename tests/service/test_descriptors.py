"""Room for connections: the limit of open files is raised as far as it goes, and what does not fit is said."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.serving import ROOT, children, gunicorn

APP = "tests.service.stream_apps:server"


def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """From now on servers are started under a limit of open files."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nulimit {limit}\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_low_limit_is_raised_as_far_as_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(tmp_path, monkeypatch, "-Sn 100")
    with gunicorn(APP, "--worker-connections", "300") as served:
        (web,) = children(served.process.pid)
        soft, hard = resource.prlimit(web, resource.RLIMIT_NOFILE)
        assert 300 < soft < 1000
        assert soft < hard
        assert json.loads(served.get("/streams"))["limit"] == 240
        assert "Warning" not in served.log()


def test_a_hard_limit_is_told_with_what_fits_and_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(tmp_path, monkeypatch, "-n 200")
    with gunicorn(APP) as served:
        (line,) = [line for line in served.log().splitlines() if line.startswith("Warning")]
        assert line == (
            "Warning: the limit of open files (ulimit -Hn) leaves room for 72 connections in each web process, "
            "not for 6500 (worker_connections)"
        )
        assert json.loads(served.get("/streams"))["limit"] == 57
        many = [served.connect() for _ in range(100)]
        for client in many:
            client.socket.close()
        assert b'"status":"ok"' in served.get("/health")
        assert "cannot accept" not in served.log()


@pytest.mark.parametrize(("limit", "fits"), [("-n 50", 1), ("-n 1000", 500), ("-n 600", 472)])
def test_how_many_fit(limit: str, fits: int) -> None:
    code = "from service.descriptors import make_room; print(make_room(500))"
    command = f'ulimit {limit}; exec "{sys.executable}" -c "{code}"'
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == (f"{fits}\n", "")

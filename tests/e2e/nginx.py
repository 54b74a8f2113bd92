"""Debian's nginx in front of a service: with the configuration that Headrace comes with, or with as good as none."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator

from tests.e2e.stack import end_all, place
from tests.programs import program
from tests.service.serving import PATIENCE_S, ROOT

SHIPPED = (ROOT / "deploy" / "nginx.conf").read_text()

# Of HTTP/1.0 to the service, buffering and gzip, as nginx has them by default in Debian.
BARE = """
gzip on;
server {
    listen 80;
    location / {
        proxy_pass http://127.0.0.1:8080;
    }
}
"""

# All its files in its directory.
AROUND = """
daemon off;
worker_processes 1;
{user}
pid {place}/pid;
error_log stderr error;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {place}/body;
    proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi;
    uwsgi_temp_path {place}/uwsgi;
    scgi_temp_path {place}/scgi;
    {sites}
}}
"""
# Whom a master that is root's has its work done by: one who may enter the directory.
USER = "user root;" if os.geteuid() == 0 else ""


@contextlib.contextmanager
def nginx(sites: str, service: int, *, errors: bool = False) -> Iterator[int]:
    """Its port. `service`: the port behind it. `errors`: whether it may write any to its log."""
    path = program("nginx")
    with place() as directory, socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        sites = replaced(
            replaced(sites, "listen 80;", f"listen 127.0.0.1:{port};"), "127.0.0.1:8080", f"127.0.0.1:{service}"
        )
        config = directory / "nginx.conf"
        config.write_text(AROUND.format(place=directory, user=USER, sites=sites))
        # It takes our socket over, as it does when it is upgraded, so that the port is ours from the first to the last,
        # and clients may connect before it is there.
        descriptor = listening.fileno()
        with subprocess.Popen(
            [path, "-p", str(directory), "-c", str(config), "-e", "stderr"],
            cwd=directory,
            env={**os.environ, "NGINX": f"{descriptor};"},
            pass_fds=[descriptor],
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stderr is not None
            listening.close()  # if it ends, they are refused
            try:
                yield port
                process.terminate()
                code = process.wait(PATIENCE_S)
                said = process.stderr.read().decode()
                assert code == 0, said
                assert ("[error]" in said) == errors, said
            finally:
                end_all(directory, process.wait)


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)

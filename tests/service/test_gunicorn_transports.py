"""Whatever gunicorn can listen on, and whoever speaks to it there: sockets of every kind, TLS, proxies."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import program
from tests.service.beside import OURS, TLS, alike, both, environ_of, is_lean, request, running
from tests.service.serving import PATIENCE_S, until

TWICE = b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n" + request("/b?c")
REQUESTS = [
    request("/"),
    request("/", host="b.example:81"),
    request("/", host="[::1]:82"),
    request("/", host="b:"),
    request("/", "X-Forwarded-Proto: https"),
    request("/", "X-Forwarded-Proto: https", host="b:83"),
    request("/", "X-Forwarded-Proto: http"),
    request("/", "X-Forwarded-For: 10.1.2.3", "X_Forwarded_For: 10.1.2.4", "SCRIPT_NAME: /a"),
    request("/", line="GET {} HTTP/1.0", host=""),
    request("/echo", "Content-Length: 4", line="POST {} HTTP/1.1", body=b"body"),
    request("/echo", "Transfer-Encoding: chunked", line="POST {} HTTP/1.1", body=b"4\r\nbody\r\n0\r\n\r\n"),
    request("/", line="HEAD {} HTTP/1.1"),
    TWICE,
    request("/stream"),
    request("/big"),
    request("/raises"),
]
OF_HTTP_1_0 = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\nGET /b HTTP/1.0\r\nConnection: close\r\n\r\n",
    b"GET /stream HTTP/1.0\r\n\r\n",
    b"GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET /one-piece HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n",
    b"POST /echo HTTP/1.0\r\nContent-Length: 4\r\n\r\nbody",
    b"HEAD / HTTP/1.0\r\n\r\n",
]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_tcp_and_a_unix_socket_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / "ours", tmp_path / "theirs"]
    with both(binds=[("127.0.0.1:0", f"unix:{path}") for path in paths]) as pair:
        alike(pair, [*REQUESTS, *OF_HTTP_1_0], 0)
        said = alike(pair, [*REQUESTS, *OF_HTTP_1_0], 1)
        assert is_lean(pair[0], 0)
        assert is_lean(pair[0], 1)
        named = [
            environ_of(server.exchange(request("/"), 1, b"\0headrace-test-%d" % number).decode())["REMOTE_ADDR"]
            for number, server in enumerate(pair)
        ]
    assert named == ["\0headrace-test-0", "\0headrace-test-1"]
    told = [environ_of(answer) for answer in said[:6]]
    assert [(environ["SERVER_NAME"], environ["SERVER_PORT"]) for environ in (*told[:2], *told[4:])] == [
        ("a", "80"),
        ("b.example", "81"),
        ("a", "443"),
        ("b", "83"),
    ]
    assert {environ["REMOTE_ADDR"] for environ in told} == {""}
    assert not paths[0].exists()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6() -> None:
    flags = "--forwarded-allow-ips", "10.0.0.1,::/64", "--header-map", "dangerous"
    with both(*flags, binds=[("[::1]:0",)] * 2) as pair:
        said = alike(pair, REQUESTS)
        assert is_lean(pair[0])
    assert environ_of(said[0])["REMOTE_ADDR"] == environ_of(said[0])["SERVER_NAME"] == "::1"
    assert environ_of(said[4])["wsgi.url_scheme"] == "https"


ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.parametrize(("activated", "family"), [(False, socket.AF_INET), (True, socket.AF_UNIX)])
def test_a_socket_that_is_bound_already(tmp_path: Path, activated: bool, family: socket.AddressFamily) -> None:
    with socket.socket(family) as bound:
        bound.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "socket"))
        bound.listen()
        number = bound.fileno()
        launcher = (sys.executable, "-c", ACTIVATE, str(number)) if activated else (sys.executable,)
        binds = () if activated else (f"fd://{number}",)
        with running(OURS, binds=binds, descriptors=[number], launcher=launcher) as server:
            assert len(server.addresses) == 1
            name = bound.getsockname()
            assert server.addresses[0] == (f"unix:{name}" if isinstance(name, str) else f"http://127.0.0.1:{name[1]}")
            assert is_lean(server)
        assert not activated or family == socket.AF_INET or (tmp_path / "socket").exists()


def test_web_processes_with_a_socket_each() -> None:
    with socket.socket() as holding:
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holding.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holding.getsockname()[1]}"
        with running(OURS, "--reuse-port", binds=[address], workers=2) as server:
            server.addresses = [f"http://{address}"]
            seen: set[bytes] = set()

            def both_have_answered() -> bool:
                with contextlib.suppress(ConnectionRefusedError):  # they are not there yet when the master is
                    seen.add(server.exchange(request("/pid")))
                return len(seen) == 2

            until(both_have_answered, "both web processes answer")


def test_tls_with_requests_one_after_the_other_and_all_at_once() -> None:
    with both("--certfile", TLS, "--keyfile", TLS) as pair:
        said = alike(pair, [*REQUESTS, *OF_HTTP_1_0])
        assert environ_of(said[0])["wsgi.url_scheme"] == "https"
        with pair[0].connect() as client:
            for _ in range(3):
                status, headers, body = client.get("/sentinel")
                assert (status, headers["connection"], body) == (200, "keep-alive", b"sentinel")
            client.send(b"GET /sentinel HTTP/1.1\r\nHost: a\r\n\r\n" * 20)
            assert [client.response()[0] for _ in range(20)] == [200] * 20


# The PROXY protocol

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
IPV4 = socket.inet_aton("10.1.2.3") + socket.inet_aton("10.0.0.1") + struct.pack("!HH", 5678, 80)
IPV6 = socket.inet_pton(socket.AF_INET6, "2001:db8::1") + socket.inet_pton(socket.AF_INET6, "::2") + b"\x16\x2e\0\x50"


def binary(version_and_command: int = 0x21, kind: int = 0x11, addresses: bytes = IPV4) -> bytes:
    return SIGNATURE + struct.pack("!BBH", version_and_command, kind, len(addresses)) + addresses


TEXT = b"PROXY TCP4 10.1.2.3 10.0.0.1 5678 80\r\n"
GOOD = [
    TEXT,
    b"PROXY TCP6 2001:db8::1 ::2 5678 80\r\n",
    binary(),
    binary(kind=0x21, addresses=IPV6),
    binary(addresses=IPV4 + b"\4\0\1x"),
]
BAD = [
    b"PROXY\r\n",
    b"PROXY TCP4 10.1.2.3 10.0.0.1 5678\r\n",
    b"PROXY TCP4 10.1.2.300 10.0.0.1 5678 80\r\n",
    b"PROXY TCP4 10.1.2.3 10.0.0.1 567890 80\r\n",
    b"PROXY TCP4 10.1.2.3 10.0.0.1 port 80\r\n",
    b"PROXY TCP6 10.1.2.3 10.0.0.1 5678 80\r\n",
    b"PROXY UDP4 10.1.2.3 10.0.0.1 5678 80\r\n",
    b"PROXY UNKNOWN\r\n",
    b"proxy TCP4 10.1.2.3 10.0.0.1 5678 80\r\n",
]
BAD_BINARY = [binary(0x11), binary(0x2F), binary(kind=0x12), binary(addresses=IPV4[:5]), binary(kind=0x21)]


@pytest.mark.parametrize("mode", ["auto", "v2"])
def test_a_proxy_says_who_the_client_is(mode: str) -> None:
    with both("--proxy-protocol", mode) as pair:
        said = alike(
            pair, [*(good + TWICE for good in GOOD), *(bad + TWICE for bad in BAD), TWICE, TEXT + TEXT + TWICE]
        )
        alike(pair, [TEXT + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + TEXT + request("/")])
        for bad in BAD_BINARY:
            assert pair[0].exchange(bad + TWICE).startswith(b"HTTP/1.1 400 ")  # where gunicorn's own says 500
    if mode != "v2":
        assert [environ["REMOTE_ADDR"] for environ in environs_of(said[0])] == ["10.1.2.3"] * 2
        assert [environ["REMOTE_ADDR"] for environ in environs_of(said[1])] == ["2001:db8::1"] * 2
    assert [environ["REMOTE_ADDR"] for environ in environs_of(said[2])] == ["10.1.2.3"] * 2
    assert [environ["REMOTE_ADDR"] for environ in environs_of(said[-2])] == ["127.0.0.1"] * 2


def environs_of(answers: str) -> list[dict[str, str]]:
    return [environ_of("\r\n\r\n" + part.partition("\r\n\r\n")[2]) for part in answers.split("HTTP/1.1 200 OK\r\n")[1:]]


def test_a_peer_that_is_no_proxy_is_refused() -> None:
    with running(OURS, "--proxy-protocol", "v1", "--proxy-allow-from", "10.0.0.1") as server:
        assert server.exchange(TEXT + TWICE).startswith(b"HTTP/1.1 403 ")
        assert server.exchange(binary() + TWICE).startswith(b"HTTP/1.1 400 ")  # of the other kind
        assert [environ["REMOTE_ADDR"] for environ in environs_of(server.exchange(TWICE).decode())] == ["127.0.0.1"] * 2


# nginx

NGINX = """
user {user};
worker_processes 1;
daemon off;
pid {place}/pid;
error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_max_body_size 10m;
    {temporary}
    upstream tcp {{ server {tcp}; keepalive 4; }}
    upstream local {{ server {local}; keepalive 4; }}
    map $uri $upstream_connection {{ ~^/old/ close; default ""; }}
    server {{
        listen unix:{place}/nginx;
        proxy_set_header Host $http_host;
        proxy_set_header X-Forwarded-Proto https;
        proxy_set_header X-Forwarded-For 10.1.2.3;
        proxy_set_header Connection $upstream_connection;
        location /tcp/ {{ proxy_pass http://tcp/; proxy_http_version 1.1; }}
        location /local/ {{ proxy_pass http://local/; proxy_http_version 1.1; }}
        location /old/ {{ proxy_pass http://tcp/; }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(place: Path, tcp: str, local: str) -> Iterator[str]:
    """In front of both; the address it listens on."""
    temporary = [f"{what}_temp_path {place}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    config = place / "nginx.conf"
    config.write_text(
        NGINX.format(
            place=place, user=pwd.getpwuid(os.getuid()).pw_name, tcp=tcp, local=local, temporary=" ".join(temporary)
        )
    )
    command = [program("nginx"), "-c", str(config), "-p", str(place), "-e", "stderr"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until((place / "pid").exists, "nginx listens")  # its socket's file is there a little earlier
        yield f"unix:{place}/nginx"
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_behind_nginx(tmp_path: Path) -> None:
    place = tmp_path / "n"
    place.mkdir()
    with running(OURS, binds=["127.0.0.1:0", f"unix:{tmp_path}/ours"]) as server:
        tcp, local = server.addresses[0].removeprefix("http://"), server.addresses[1]
        with nginx(place, tcp, local) as address:
            server.addresses = [address]
            body = b"0123456789" * 500_000
            for way in ("tcp", "local", "old"):
                with server.connect() as client:
                    for _ in range(5):
                        client.send(f"GET /{way}/a?b HTTP/1.1\r\nHost: a:81\r\n\r\n".encode())
                        status, _, answer = client.response()
                        told = environ_of("\r\n\r\n" + answer.decode())
                        assert status == 200
                        assert (told["wsgi.url_scheme"], told["HTTP_HOST"]) == ("https", "a:81")
                        assert (told["PATH_INFO"], told["QUERY_STRING"]) == ("/a", "b")
                        assert told["SERVER_PROTOCOL"] == ("HTTP/1.0" if way == "old" else "HTTP/1.1")
                    client.send(
                        f"POST /{way}/echo HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                    )
                    assert client.response()[::2] == (200, body)
                    client.send(f"GET /{way}/stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
                    assert b"one" in client.rest()
        assert "Traceback" not in server.log()

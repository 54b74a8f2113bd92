"""Requests made by chance, from the corpus and from pieces of HTTP: our worker answers them as gunicorn's gevent worker
does, and the express lane as Flask does. What fails prints the request as a Python literal, fit for the corpus."""

from __future__ import annotations

import re
import time
from random import Random

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.equality import wire
from tests.equality.corpus import ENTRIES
from tests.equality.differences import told, unexplained
from tests.equality.servers import HEADRACE, Servers
from tests.lengths import FUZZ_S, SEED

REFERENCE = "gevent"
# Without the answers that are no HTTP, where nobody can tell where one ends, and those that hang on what was before.
_LEFT_OUT = re.compile("/length-|/never-starts|/too-short|/raises-midway|closed once")
_MATERIAL = [entry.bytes for name, entry in ENTRIES.items() if len(entry.bytes) < 1500 and not _LEFT_OUT.search(name)]
_BYTES = b"\r\n\t \0\x0b\x7f\x80\xff:;,/?#%&=\"'*-+_.0123456789AZaz"
_TOKENS = (
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b": ", b"  ", b"HTTP/1.1", b"HTTP/1.0", b"GET ", b"HEAD ", b"POST ", b"/echo",
    b"/unread", b"%2F", b"http://a", b"chunked", b"close", b"0\r\n\r\n", b"5\r\n12345\r\n", b"X_A: b\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n",
    b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b"Host: b\r\n",
)  # fmt: skip


def differs(servers: Servers, app: str, request: bytes) -> str:
    """In words; empty if it does not. Behind each request comes one more, to see what is left of the connection."""

    def asked(worker: str, app: str) -> wire.Record:
        return wire.exchange(servers.port(worker, app), [request + wire.SENTINEL], half_close=True)

    ours, theirs = asked(HEADRACE, app), asked(REFERENCE, app)
    if app == "express" and ours != (by_flask := asked(HEADRACE, "by_flask")):
        return f"the express lane and Flask:\n{told(request, ours, by_flask)}"
    if ours == theirs:
        return ""
    (ours, theirs), _ = unexplained(ours, theirs, REFERENCE, None, request)
    return "" if ours == theirs else f"{app}:\n{told(request, ours, theirs)}"


# The corpus, changed


def _deleted(random: Random, data: bytes) -> bytes:
    at, size = random.randrange(len(data)), random.choice((1, 1, 2, 5, 20))
    return data[:at] + data[at + size :]


def _doubled(random: Random, data: bytes) -> bytes:
    at, size = random.randrange(len(data)), random.choice((1, 2, 10, 40))
    return data[: at + size] + data[at:]


def _replaced(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([random.choice(_BYTES)]) + data[at + 1 :]


def _inserted(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice(_TOKENS) + data[at:]


def _inserted_line(random: Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    lines.insert(random.randrange(len(lines) + 1), random.choice(random.choice(_MATERIAL).split(b"\r\n")))
    return b"\r\n".join(lines)


def _exchanged_lines(random: Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\r\n".join(lines)


def _spliced(random: Random, data: bytes) -> bytes:
    other = random.choice(_MATERIAL)
    return data[: random.randrange(len(data) + 1)] + other[random.randrange(len(other) + 1) :]


def _other_case(random: Random, data: bytes) -> bytes:
    at, size = random.randrange(len(data)), random.choice((1, 5, 20))
    return data[:at] + data[at : at + size].swapcase() + data[at + size :]


def _other_number(random: Random, data: bytes) -> bytes:
    digits = [at for at, byte in enumerate(data) if byte in b"0123456789"]
    if not digits:
        return data
    at = random.choice(digits)
    return data[:at] + str(random.choice((0, 1, 2, 4, 5, 9, 10, 16, 255, 65536, -1))).encode() + data[at + 1 :]


_CHANGES = (
    _deleted,
    _doubled,
    _replaced,
    _inserted,
    _inserted_line,
    _exchanged_lines,
    _spliced,
    _other_case,
    _other_number,
)


def changed(random: Random) -> bytes:
    data = random.choice(_MATERIAL)
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        data = random.choice(_CHANGES)(random, data) if data else random.choice(_MATERIAL)
    return data


def test_requests_of_the_corpus_changed_by_chance_are_answered_alike(servers: Servers) -> None:
    random = Random(SEED)
    until = time.monotonic() + FUZZ_S / 2
    sent, found = 0, []
    while time.monotonic() < until and len(found) < 5:
        app = random.choice(("express", "plain"))
        difference = differs(servers, app, changed(random))
        found += [difference] if difference else []
        sent += 1
    print(f"{sent} requests, HRTEST_STORM_SEED={SEED}")
    assert not found, "\n".join(found)


# HTTP, put together


_METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"CONNECT", b"get", b""]) | st.binary(
    max_size=5
)
_TARGETS = st.sampled_from(
    [
        b"/environ",
        b"/echo",
        b"/unread",
        b"/stream",
        b"/text",
        b"/",
        b"//",
        b"*",
        b"a",
        b"http://a/environ",
        b"",
        b"/%2f%00%e9?a#b",
    ]
) | st.binary(max_size=12).map(lambda tail: b"/environ" + tail)
_VERSIONS = st.sampled_from([b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"", b"http/1.1"])
_ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n", b" \r\n"])
_NAMES = st.sampled_from([
    b"Host", b"host", b"Content-Length", b"content-length", b"Transfer-Encoding", b"Connection", b"Expect", b"Upgrade",
    b"X-A", b"X_A", b"Content-Type", b"X-Forwarded-Proto", b"SCRIPT_NAME", b"Keep-Alive", b"Trailer", b"X-Request-ID",
    b"", b"X A",
])  # fmt: skip
_COLONS = st.sampled_from([b": "] * 8 + [b":", b" : ", b":\t", b""])
_VALUES = st.binary(max_size=6) | st.sampled_from([
    b"a", b"", b"0", b"3", b"5", b"05", b"+5", b"5, 5", b"chunked", b"gzip, chunked", b"identity", b"close", b"upgrade",
    b"keep-alive", b"websocket", b"https", b"http", b"100-continue", b"a\tb", b"\x80\xff",
])  # fmt: skip
_FIELDS = st.builds(lambda *parts: b"".join(parts), _NAMES, _COLONS, _VALUES, _ENDS)
_BODIES = st.sampled_from(
    [b"", b"", b"123", b"12345", b"0\r\n\r\n", b"3\r\nabc\r\n0\r\n\r\n", b"3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\n"]
) | (st.binary(max_size=20))
_REQUESTS = st.builds(
    lambda method, target, version, end, fields, last, body: (
        method + b" " + target + b" " + version + end + b"".join(fields) + last + body
    ),
    _METHODS,
    _TARGETS,
    _VERSIONS,
    _ENDS,
    st.lists(_FIELDS, max_size=5),
    _ENDS,
    _BODIES,
)


@settings(
    max_examples=max(10, int(FUZZ_S * 40)),
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(_REQUESTS, min_size=1, max_size=3).map(b"".join), st.sampled_from(["express", "plain"]))
def test_requests_put_together_by_chance_are_answered_alike(servers: Servers, request_bytes: bytes, app: str) -> None:
    difference = differs(servers, app, request_bytes)
    assert not difference, difference

"""Connections: whether they stay, expectations, upgrades, pipelines, and clients that leave."""

from __future__ import annotations

from tests.equality.entry import Subject, chunked, chunks, get, head, post, sent

STAYING, EXPECTING, UPGRADING, PIPELINES, LEAVING = Subject(), Subject(), Subject(), Subject(), Subject()
SUBJECTS = {
    "staying": STAYING,
    "expectations": EXPECTING,
    "upgrades": UPGRADING,
    "pipelines": PIPELINES,
    "leaving": LEAVING,
}

_CONNECTIONS = (
    "close", "Close", "CLOSE", "keep-alive", "Keep-Alive", "KEEP-ALIVE", "close, x", "x, close", "keep-alive, close",
    "close, keep-alive", "Upgrade", "upgrade, close", "", ",", "x", "close ", "\tclose", '"close"', "TE", "Host",
    "close\x0c", "Content-Length", "X-Request-ID", "\xe9",
)  # fmt: skip
for value in _CONNECTIONS:
    STAYING.add(f"Connection {value!r}", get("/text", f"Connection: {value}"))
    STAYING.add(f"Connection {value!r} with a body", post("/echo", f"Connection: {value}", body="body"))
for first, second in (("close", "keep-alive"), ("keep-alive", "close"), ("x", "close"), ("", "close")):
    STAYING.add(f"Connection twice: {first}, {second}", get("/text", f"Connection: {first}", f"connection: {second}"))
STAYING.add("Connection_", get("/text", "Connection_: close"))
STAYING.add("Proxy-Connection close", get("/environ", "Proxy-Connection: close"))
STAYING.add("Proxy-Connection keep-alive", get("/environ", "Proxy-Connection: keep-alive", version="HTTP/1.0"))
STAYING.add("Keep-Alive", get("/environ", "Keep-Alive: timeout=1, max=1"))
STAYING.add("close on an error", get("/nowhere", "Connection: close"))
STAYING.add("close on a stream", get("/stream", "Connection: close"))
STAYING.add("close on a HEAD", get("/text", "Connection: close", method="HEAD"))
STAYING.add("close on a HEAD of a stream", get("/stream", "Connection: close", method="HEAD"))
STAYING.add("close, then a request", get("/text", "Connection: close") + get("/nowhere"))
STAYING.add("one after another", get("/text"), post(body="body"), chunked(chunks("1")), get("/stream"), answers=4)
STAYING.add("one after another, the last closes", get("/text"), get("/text", "Connection: close"), answers=2)
STAYING.add("one after another, one unread", post("/unread", body="x" * 100), post(body="y"), answers=2)
STAYING.add("one after another, the second bad", get("/text"), "nonsense\r\n\r\n", answers=2)
STAYING.add("one after another, the second odd", get("/text"), get("/environ", "X_A: b"), get("//x"), answers=3)

_EXPECTING = {
    "100-continue": "100-continue", "100-Continue": "100-Continue", "200-ok": "200-ok", "empty": "",
    "two": "100-continue, 200-ok", "spaces": "  100-continue\t", "a parameter": "100-continue;q=1",
}  # fmt: skip
for name, value in _EXPECTING.items():
    EXPECTING.add(f"Expect {name}, body at once", post("/echo", f"Expect: {value}", body="body"))
    EXPECTING.add(f"Expect {name}, no body", get("/environ", f"Expect: {value}"))
EXPECTING.add("Expect twice", post("/echo", "Expect: 100-continue", "Expect: 100-continue", body="body"))
EXPECTING.add("Expect_", post("/echo", "Expect_: 100-continue", body="body"))
EXPECTING.add("Expect, body when asked for", sent("/echo", "Content-Length: 4", "Expect: 100-continue"), "body")
EXPECTING.add(
    "Expect, chunks when asked for", sent("/echo", "Transfer-Encoding: chunked", "Expect: 100-continue"), chunks("1")
)
EXPECTING.add("Expect, chunks at once", chunked(chunks("1"), "Expect: 100-continue"))
EXPECTING.add("Expect, unread, body at once", post("/unread", "Expect: 100-continue", body="body"))
EXPECTING.add(
    "Expect, unread, no body comes", sent("/unread", "Content-Length: 4", "Expect: 100-continue"), half_close=True
)
EXPECTING.add("Expect, length zero", post("/echo", "Expect: 100-continue"))
EXPECTING.add("Expect of HTTP/1.0", head("POST /echo HTTP/1.0", "Expect: 100-continue", "Content-Length: 4") + b"body")
EXPECTING.add(
    "Expect an unknown thing of HTTP/1.0", head("POST /echo HTTP/1.0", "Expect: x", "Content-Length: 1") + b"1"
)
EXPECTING.add(
    "Expect, too large", sent("/echo", "Content-Length: 999999999999", "Expect: 100-continue"), half_close=True
)
EXPECTING.add("Expect on a 404", post("/nowhere", "Expect: 100-continue", body="body"))
EXPECTING.add("Expect, then a request", post("/echo", "Expect: 100-continue", body="body") + get(), answers=2)
EXPECTING.add("Expect and bad chunks", chunked("Z\r\n", "Expect: 100-continue"), half_close=True)

_UPGRADES = {
    "websocket": ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: a", "Sec-WebSocket-Version: 13"],
    "h2c": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"],
    "h2c without settings": ["Connection: Upgrade", "Upgrade: h2c"],
    "TLS": ["Connection: Upgrade", "Upgrade: TLS/1.0"],
    "a list": ["Connection: keep-alive, Upgrade", "Upgrade: h2c, websocket"],
    "nothing": ["Connection: Upgrade"],
    "without Connection": ["Upgrade: websocket"],
    "empty": ["Connection: Upgrade", "Upgrade:"],
    "and close": ["Connection: close", "Upgrade: websocket"],
    "HTTP/2.0": ["Connection: Upgrade", "Upgrade: HTTP/2.0"],
}
for name, headers in _UPGRADES.items():
    UPGRADING.add(f"Upgrade {name}", get("/environ", *headers))
    UPGRADING.add(f"Upgrade {name}, with a body", post("/echo", *headers, body="body"))
UPGRADING.add("Upgrade, then a request", get("/text", *_UPGRADES["websocket"]) + get(), answers=2)
UPGRADING.add("HTTP/2 from the start", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", half_close=True)

_GOOD = get("/environ?n=1")
PIPELINES.add("good, good", _GOOD + get("/text"), answers=2)
PIPELINES.add("POST, GET", post(body="body") + get(), answers=2)
PIPELINES.add("GET, POST", get() + post(body="body"), answers=2)
PIPELINES.add("ten GETs", b"".join(get(f"/environ?n={n}") for n in range(10)), answers=10)
PIPELINES.add("ten POSTs", b"".join(post(body=f"body {n}") for n in range(10)), answers=10)
PIPELINES.add("ten POSTs and GETs", b"".join(post(body=str(n)) + get(f"/environ?n={n}") for n in range(10)), answers=20)
PIPELINES.add("a hundred GETs", get("/text") * 100, answers=100)
PIPELINES.add("ten chunked", b"".join(chunked(chunks(str(n))) for n in range(10)), answers=10)
PIPELINES.add("unread, GET", post("/unread", body="body") + get(), answers=2)
PIPELINES.add("large unread, GET", post("/unread", body="x" * 60_000) + get(), answers=2)
PIPELINES.add("unread of a GET, GET", sent("/text", "Content-Length: 5", body="12345", method="GET") + get(), answers=2)
PIPELINES.add("404 with a body, GET", post("/nowhere", body="body") + get(), answers=2)
PIPELINES.add("405 with a body, GET", post("/text", body="body") + get(), answers=2)
PIPELINES.add("500, GET", get("/value-error") + get(), answers=2)
PIPELINES.add("stream, GET", get("/stream") + get(), answers=2)
PIPELINES.add("streamed body, GET", post("/stream", body="body") + get(), answers=2)
PIPELINES.add("Flask, light, Flask", get("/flask/text") + get("/text") + get("/flask/environ"), answers=3)
PIPELINES.add("good, bad line", _GOOD + b"nonsense\r\n\r\n", answers=2)
PIPELINES.add("good, bad header", _GOOD + get("/", "X A: b"), answers=2)
PIPELINES.add("good, both lengths", _GOOD + sent("/echo", "Content-Length: 1", "Transfer-Encoding: chunked"), answers=2)
PIPELINES.add("good, too long a line", _GOOD + get("/" + "x" * 9000), answers=2)
PIPELINES.add("good, bad, good", _GOOD + b"nonsense\r\n\r\n" + _GOOD, answers=2)
PIPELINES.add("good, chunked, good", _GOOD + chunked(chunks("1")) + _GOOD, answers=3)
PIPELINES.add("good, Expect, good", _GOOD + post("/echo", "Expect: 100-continue", body="b") + _GOOD, answers=3)
PIPELINES.add("good, HTTP/1.0, good", _GOOD + get("/text", version="HTTP/1.0") + _GOOD, answers=2)
PIPELINES.add("good, Upgrade, good", _GOOD + get("/text", *_UPGRADES["websocket"]) + _GOOD, answers=3)
PIPELINES.add("good, underscore, good", _GOOD + get("/environ", "X_A: b") + _GOOD, answers=3)
PIPELINES.add("good, absolute, good", _GOOD + get("http://a/environ") + _GOOD, answers=3)
PIPELINES.add("good, close, good", _GOOD + get("/text", "Connection: close") + _GOOD, answers=2)
PIPELINES.add("good, half a request", _GOOD + b"GET /text HT", half_close=True)
PIPELINES.add("good, half a body", _GOOD + sent("/echo", "Content-Length: 9", body="12345"), half_close=True)
PIPELINES.add("good, garbage", _GOOD + bytes(range(256)), half_close=True)
PIPELINES.add("good, bad chunks", _GOOD + chunked("Z\r\n"), half_close=True)
PIPELINES.add(
    "a body longer than said, then a request", sent("/echo", "Content-Length: 1", body=b"12" + get()), answers=2
)
PIPELINES.add(
    "a large head behind a large body", post(body="x" * 9000) + get("/environ", "X-A: " + "b" * 8000), answers=2
)

LEAVING.add("says nothing", b"", half_close=True)
LEAVING.add("one letter", b"G", half_close=True)
LEAVING.add("half a line", b"GET /environ HT", half_close=True)
LEAVING.add("a line", b"GET /environ HTTP/1.1\r\n", half_close=True)
LEAVING.add("half a header", b"GET /environ HTTP/1.1\r\nHost: a", half_close=True)
LEAVING.add("all but the last LF", get()[:-1], half_close=True)
LEAVING.add("all but the last line", get()[:-2], half_close=True)
LEAVING.add("a request, then nothing", get(), half_close=True)
LEAVING.add("a request of HTTP/1.0, then nothing", get(version="HTTP/1.0"), half_close=True)
LEAVING.add("a body, then nothing", post(body="body"), half_close=True)
LEAVING.add("a stream, then nothing", get("/stream"), half_close=True)
LEAVING.add("a large body, then nothing", post(body="x" * 100_000), half_close=True)

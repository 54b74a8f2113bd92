"""Answers: every route of the two applications."""

from __future__ import annotations

from tests.equality import plain
from tests.equality.entry import OURS, PLAIN, Subject, get, post

LIGHT, OF_FLASK, OF_WSGI = Subject((OURS,)), Subject((OURS,)), Subject((PLAIN,))
SUBJECTS = {"light answers": LIGHT, "Flask's answers": OF_FLASK, "WSGI's answers": OF_WSGI}

_LIGHT = [
    "text",
    "json",
    "bytes",
    "big",
    "path",
    "headers",
    "empty",
    "empty-with-body",
    "not-modified",
    "own-headers",
    "own-length",
    "own-short-length",
    "close",
    "hop",
    "date",
    "spaces",
    "own-id",
    "499",
    "299",
    "created",
    "werkzeug",
    "werkzeug-stream",
    "http-error",
    "value-error",
    "abort",
    "no-response",
    "nan",
    "bad-header",
    "bad-value",
    "stream",
    "list",
    "empty-list",
    "sse",
    "sse-fails",
    "tokens",
    "tokens-none",
    "tokens-cut",
    "tokens-failed",
    "tokens-numbered",
    "stream-length",
    "stream-204",
    "body",
]
for path in _LIGHT:
    LIGHT.add(f"light /{path}", get(f"/{path}"))
    LIGHT.add(f"light HEAD /{path}", get(f"/{path}", method="HEAD"))
    LIGHT.add(f"light /{path} of HTTP/1.0", get(f"/{path}", version="HTTP/1.0"))
for kind in ("invalid", "unknown", "overloaded", "died", "failed", "deadline"):
    LIGHT.add(f"light pool error {kind}", get(f"/pool-error?kind={kind}"))
for status in (400, 401, 404, 405, 413, 429, 500, 503):
    LIGHT.add(f"light abort {status}", get(f"/abort?status={status}"))
for path in ("breaks-first", "breaks-later"):
    LIGHT.add(f"light /{path}", get(f"/{path}"), half_close=True)
    LIGHT.add(f"light /{path} of HTTP/1.0", get(f"/{path}", version="HTTP/1.0"), half_close=True)
LIGHT.add("light PUT on the route of a GET", post("/text", method="PUT"))
LIGHT.add("light failure of a query", get("/pool-error"))
LIGHT.add("light failure, then a request", get("/value-error") + get("/text"), answers=2)

_OF_FLASK = [
    "text",
    "json",
    "environ",
    "stream",
    "redirect",
    "slash",
    "slash/",
    "abort",
    "raises",
    "pieces",
    "file",
    "item/7",
    "item/x",
    "cookie",
    "nowhere",
]
for path in _OF_FLASK:
    OF_FLASK.add(f"Flask /{path}", get(f"/flask/{path}"))
    OF_FLASK.add(f"Flask HEAD /{path}", get(f"/flask/{path}", method="HEAD"))
    OF_FLASK.add(f"Flask OPTIONS /{path}", get(f"/flask/{path}", method="OPTIONS"))
    OF_FLASK.add(f"Flask /{path} of HTTP/1.0", get(f"/flask/{path}", version="HTTP/1.0"))
OF_FLASK.add("Flask POST", post("/flask/environ", body="body"))
OF_FLASK.add("Flask PUT", post("/flask/environ", body="body", method="PUT"))
OF_FLASK.add("Flask POST on the view of a GET", post("/flask/text", body="body"))

# Whose answers break off, or lie about their length, so that only the end of the connection is one.
_BROKEN = {"/too-short", "/raises-sent", "/raises-midway", "/replaces-late", "/text-piece-later", "/length-negative"}
_BROKEN |= {"/text-piece", "/number-piece", "/hop-transfer-encoding", "/status-long"}
_BROKEN |= {"/length-plus", "/never-starts", "/never-starts-empty"}
for path in plain.ROUTES:
    if path not in ("/sentinel", "/echo", "/unread", "/closed"):
        broken = path in _BROKEN
        OF_WSGI.add(f"WSGI {path}", get(path), half_close=broken)
        # After an Upgrade only the version tells that the connection ends.
        ends = broken or path.startswith("/hop-upgrade")
        OF_WSGI.add(f"WSGI {path} of HTTP/1.0", get(path, version="HTTP/1.0"), half_close=ends)
        OF_WSGI.add(f"WSGI HEAD {path}", get(path, method="HEAD"), half_close=broken)
OF_WSGI.add("WSGI body closed once", get("/closed?once") + get("/closes?once") + get("/closed?once"), answers=3)
OF_WSGI.add("WSGI body closed badly, then a request", get("/closes-badly") + get(), half_close=True)
OF_WSGI.add("WSGI answer kept alive", get("/one-piece") + get("/204") + get("/304") + get("/no-piece"), answers=4)

"""Request lines: methods, versions, targets, and what may stand in the way of one."""

from __future__ import annotations

from tests.equality.entry import Subject, get, head, post

METHODS, VERSIONS, TARGETS, LINES = Subject(), Subject(), Subject(), Subject()
SUBJECTS = {"methods": METHODS, "versions": VERSIONS, "targets": TARGETS, "request lines": LINES}

LIMIT = 8190  # of a request line, in `service/gunicorn_conf.py`

for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PURGE", "PROPFIND"):
    METHODS.add(f"method {method}", get(method=method))
for method in ("POST", "PUT", "DELETE", "PATCH", "PURGE"):
    METHODS.add(f"method {method} with a body", post(method=method, body="body"))
for path in ("/text", "/json", "/echo", "/stream", "/nowhere", "/empty", "/own-head"):
    METHODS.add(f"HEAD {path}", get(path, method="HEAD"))
    METHODS.add(f"OPTIONS {path}", get(path, method="OPTIONS"))
METHODS.add("HEAD then GET", get("/stream", method="HEAD") + get("/text"), answers=2)
METHODS.add("HEAD with a body", post("/environ", method="HEAD", body="body"))
METHODS.add("OPTIONS of a declared route", get("/own-options", method="OPTIONS"))
METHODS.add("OPTIONS *", get("*", method="OPTIONS"))
METHODS.add("GET *", get("*"))
METHODS.add("TRACE with a body", post("/environ", method="TRACE", body="body"))
METHODS.add("CONNECT to an authority", get("a:443", method="CONNECT"))
METHODS.add("CONNECT to a path", get("/environ", method="CONNECT"))
METHODS.add("CONNECT then GET", get("/environ", method="CONNECT") + get())
METHODS.add("CONNECT with a body", post("/environ", method="CONNECT", body="body"))
for method in ("get", "Get", "GEt", "G", "GE", "XYZ", "M-SEARCH", "A1B2", "GET!", "GET#", "$%&", "GÉT", "GE\0T", "G:T"):
    METHODS.add(f"method {method!r}", get(method=method))
for length in (19, 20, 21, 8000):
    METHODS.add(f"a method of {length}", get(method="M" * length))
METHODS.add("no method", " /environ HTTP/1.1\r\nHost: a\r\n\r\n")
METHODS.add("PRI of HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
METHODS.add("GET for what is POST only", get("/echo"))
METHODS.add("POST for what is GET only", post("/text"))
METHODS.add("DELETE for what is not there", get("/nowhere", method="DELETE"))

for version in ("HTTP/1.0", "HTTP/1.2", "HTTP/1.9", "HTTP/2.0", "HTTP/0.9", "HTTP/3.0", "HTTP/1.1.1", "HTTP/11.1"):
    VERSIONS.add(f"version {version}", get(version=version))
for version in (
    "http/1.1",
    "HTTP/1",
    "HTTP/1.",
    "HTTP/.1",
    "HTTP/1.10",
    "HTTP/01.1",
    "HTTP 1.1",
    "HTTPS/1.1",
    "XTTP/1.1",
):
    VERSIONS.add(f"version {version}", get(version=version))
for version in (
    "HTTP/1,1",
    "HTTP/+1.1",
    "HTTP/1.-1",
    "HTTP/1.1\0",
    "HTTP/1.\xb2",
    "HTTP/1.1 ",
    " HTTP/1.1",
    "HTTP/1.1\t",
):
    VERSIONS.add(f"version {version!r}", get(version=version))
for connection in ("keep-alive", "Keep-Alive", "close", "KEEP-ALIVE, x", ""):
    VERSIONS.add(f"HTTP/1.0, Connection: {connection}", get("/text", f"Connection: {connection}", version="HTTP/1.0"))
VERSIONS.add("HTTP/1.0 without Host", head("GET /environ HTTP/1.0", host=None))
VERSIONS.add("HTTP/1.0 stream", get("/stream", version="HTTP/1.0"))
VERSIONS.add("HTTP/1.0 stream, kept alive", get("/stream", "Connection: keep-alive", version="HTTP/1.0"))
VERSIONS.add("HTTP/1.0 POST", head("POST /echo HTTP/1.0", "Content-Length: 4") + b"body")
VERSIONS.add("HTTP/1.0 POST without a length", head("POST /echo HTTP/1.0") + b"body", half_close=True)
VERSIONS.add("HTTP/1.0 chunked", head("POST /echo HTTP/1.0", "Transfer-Encoding: chunked") + b"0\r\n\r\n")
VERSIONS.add("HTTP/1.0 pair", get("/text", "Connection: keep-alive", version="HTTP/1.0") * 2, answers=2)
VERSIONS.add("HTTP/1.0 then HTTP/1.1", get("/text", version="HTTP/1.0") + get("/text"))
VERSIONS.add("HTTP/1.1 then HTTP/1.0", get("/text") + get("/text", version="HTTP/1.0"), answers=2)
VERSIONS.add("HTTP/0.9", "GET /environ\r\n", half_close=True)
VERSIONS.add("HTTP/0.9 with a head", "GET /environ\r\nHost: a\r\n\r\n")
VERSIONS.add("HTTP/1.2 chunked", head("POST /echo HTTP/1.2", "Transfer-Encoding: chunked") + b"1\r\na\r\n0\r\n\r\n")

_TARGETS = {
    "absolute": "http://a/environ?x=1",
    "absolute, another host": "http://b/environ",
    "absolute, https": "https://a/environ",
    "absolute, upper case": "HTTP://A/environ",
    "absolute, unknown scheme": "ftp://a/environ",
    "absolute, with a port": "http://a:80/environ",
    "absolute, bad port": "http://a:port/environ",
    "absolute, IPv6": "http://[::1]/environ",
    "absolute, half IPv6": "http://[::1/environ",
    "absolute, user": "http://u:p@a/environ",
    "absolute, no path": "http://a",
    "absolute, query only": "http://a?x=1",
    "absolute, no host": "http:///environ",
    "absolute, two slashes": "http://a//environ",
    "absolute, no scheme": "://a/environ",
    "absolute within a path": "/http://a/environ",
    "authority": "a:80",
    "host": "a",
    "without a slash": "environ",
    "with a dot": "./environ",
    "question mark first": "?x=1",
    "hash first": "#x",
    "percent first": "%2Fenviron",
    "two slashes": "//environ",
    "three slashes": "///environ",
    "two slashes and a host": "//a/environ",
    "two slashes and half IPv6": "//[a/environ",
    "two slashes within": "/a//environ",
    "slash at the end": "/environ/",
    "dots": "/a/../environ",
    "encoded dots": "/%2e%2e/environ",
    "backslash": "/\\environ",
    "semicolon": "/environ;a=b",
    "encoded slash": "/pattern/a%2Fb",
    "encoded letter": "/%65nviron",
    "encoded lower case hex": "/%c3%a9",
    "encoded UTF-8": "/%C3%A9",
    "encoded latin-1": "/%E9",
    "encoded bad UTF-8": "/%ff%fe",
    "encoded surrogate": "/%ED%A0%80",
    "encoded NUL": "/environ%00",
    "encoded CR LF": "/environ%0d%0aX:%20y",
    "encoded space": "/a%20b",
    "plus": "/a+b",
    "encoded percent": "/%2565nviron",
    "bad encoding": "/%zz",
    "half encoding": "/environ%2",
    "lone percent": "/environ%",
    "encoded question mark": "/environ%3Fx=1",
    "encoded hash": "/environ%23x",
    "query": "/environ?a=1&b=2&a=3",
    "query, empty": "/environ?",
    "query, two marks": "/environ??x",
    "query, encoded": "/environ?a=%C3%A9%00&b=%zz",
    "query, brackets": '/environ?a[]=1&b={"c":2}',
    "query, quotes": "/environ?a='b\"<c>`|^",
    "query, slashes": "/environ?/../x//",
    "query, semicolon": "/environ?a=1;b=2",
    "query, scheme": "/environ?u=http://b/",
    "query of a path": "/path?a=1&a=2&b=%C3%A9&c",
    "fragment": "/environ#part",
    "fragment, empty": "/environ#",
    "fragment before the query": "/environ#part?x=1",
    "fragment after the query": "/environ?x=1#part",
    "root": "/",
    "upper case": "/ENVIRON",
    "dotted": "/dotted.name",
    "slash route": "/slash/",
    "slash route without it": "/slash",
    "Flask's slash route without it": "/flask/slash",
    "group": "/group/inner",
    "blueprint": "/blueprint/inner",
    "pattern": "/pattern/name",
    "pattern of UTF-8": "/pattern/%C3%A9",
    "pattern of a newline": "/pattern/a%0A",
    "item": "/flask/item/5",
    "item of no number": "/flask/item/x",
    "tilde": "/~environ",
    "all marks": "/!$&'()*+,;=:@-._~",
    "braces": "/{environ}|^`",
    "raw latin-1": "/\xe9",
    "raw UTF-8": "/\xc3\xa9",
    "raw NUL": "/environ\0",
    "raw DEL": "/environ\x7f",
    "raw tab": "/environ\tx",
    "raw vertical tab": "/environ\x0bx",
    "raw CR": "/environ\rx",
    "raw latin-1 in the query": "/environ?\xe9",
    "raw latin-1 in the fragment": "/environ#\xe9",
}
for name, target in _TARGETS.items():
    TARGETS.add(f"target: {name}", get(target))
for mark in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~":
    TARGETS.add(f"target: a {mark} here and there", get(f"/x{mark}y{mark}{mark}?x{mark}y"))
    TARGETS.add(f"target: a {mark} first", get(f"/{mark}environ?{mark}"))


def of_length(length: int) -> str:
    return "/environ?" + "x" * (length - len("GET /environ? HTTP/1.1"))


for length in (LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 2, LIMIT + 3, 20_000):
    LINES.add(f"a line of {length}", get(of_length(length)))
LINES.add("a line of 9000 without an end", "GET /" + "x" * 9000, half_close=True)
LINES.add("a line of 8000 without an end", "GET /" + "x" * 8000, half_close=True)
LINES.add("a long line after an empty one", b"\r\n" + get(of_length(LIMIT)))
LINES.add("a too long line after an empty one", b"\r\n" + get(of_length(LIMIT + 1)))
LINES.add("a long path", get("/" + "x" * 8000))
LINES.add("two spaces after the method", get(" /environ"))
LINES.add("two spaces before the version", get("/environ "))
LINES.add("a space in the target", get("/a b"))
LINES.add("a tab after the method", "GET\t/environ HTTP/1.1\r\nHost: a\r\n\r\n")
LINES.add("a tab before the version", "GET /environ\tHTTP/1.1\r\nHost: a\r\n\r\n")
LINES.add("a space before the method", b" " + get())
LINES.add("a tab before the method", b"\t" + get())
LINES.add("no target", "GET HTTP/1.1\r\nHost: a\r\n\r\n")
LINES.add("an empty target", "GET  HTTP/1.1\r\nHost: a\r\n\r\n")
LINES.add("no version", "GET /environ \r\nHost: a\r\n\r\n")
LINES.add("one word", "nonsense\r\n\r\n")
LINES.add("a header for a line", "Host: a\r\n\r\n")
LINES.add("an empty line before", b"\r\n" + get())
LINES.add("two empty lines before", b"\r\n\r\n" + get())
LINES.add("an LF before", b"\n" + get())
LINES.add("a CR before", b"\r" + get())
LINES.add("CR CR LF before", b"\r\r\n" + get())
LINES.add("an empty line between", get() + b"\r\n" + get(), answers=2)
LINES.add("two empty lines between", get() + b"\r\n\r\n" + get(), answers=2)
LINES.add("an empty line behind a body", post(body="body") + b"\r\n" + get(), answers=2)
LINES.add("only empty lines", b"\r\n" * 10)
LINES.add("one empty line", b"\r\n", half_close=True)
LINES.add("one CR", b"\r", half_close=True)
LINES.add("an LF for an end", "GET /environ HTTP/1.1\nHost: a\r\n\r\n")
LINES.add("a CR for an end", "GET /environ HTTP/1.1\rHost: a\r\n\r\n")
LINES.add("CR CR LF for an end", "GET /environ HTTP/1.1\r\r\nHost: a\r\n\r\n")
LINES.add("a space at the end", "GET /environ HTTP/1.1 \r\nHost: a\r\n\r\n")
LINES.add("NUL first", b"\0" + get())
LINES.add("a byte order mark first", b"\xef\xbb\xbf" + get())
LINES.add("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", half_close=True)
LINES.add("all bytes", bytes(range(256)), half_close=True)
LINES.add("a PROXY line", b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + get())
LINES.add("no header at all", "GET /environ HTTP/1.1\r\n\r\n")

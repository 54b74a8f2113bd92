"""Header fields: their form, their number, and the fields that mean something."""

from __future__ import annotations

from tests.equality.entry import Subject, get, head, post, raw_bytes

HOSTS, FORMS, SIZES, FIELDS = Subject(), Subject(), Subject(), Subject()
SUBJECTS = {"hosts": HOSTS, "header forms": FORMS, "header sizes": SIZES, "header fields": FIELDS}

LIMIT = 8190  # of a field, with its CR LF, in `service/gunicorn_conf.py`

_LINE = "GET /environ HTTP/1.1"
_HOSTS = [
    "a:8080",
    "A.B",
    "a:port",
    "a:",
    ":80",
    "[::1]",
    "[::1]:80",
    "[::1",
    "1.2.3.4",
    "a_b",
    "a,b",
    "a/b",
    "a\\b",
    "user@a",
    "a?b",
    "a#b",
    "a%20b",
    "*",
    "xn--a",
    "é",
    "Ã©",
    "a..",
    ".a",
    "-a",
    "127.0.0.1:99999",
    "a;b",
    "a=b",
    "<a>",
    "a:80:80",
]
for host in _HOSTS:
    HOSTS.add(f"Host {host!r}", head(_LINE, host=f"Host: {host}"))
HOSTS.add("no Host", head(_LINE, host=None))
HOSTS.add("no Host but another field", head(_LINE, "X-A: b", host=None))
HOSTS.add("empty Host", head(_LINE, host="Host:"))
HOSTS.add("blank Host", head(_LINE, host="Host:  \t "))
HOSTS.add("Host with a space", head(_LINE, host="Host: a b"))
HOSTS.add("two Hosts", head(_LINE, "Host: b"))
HOSTS.add("two equal Hosts", head(_LINE, "Host: a"))
HOSTS.add("two Hosts in other letters", head(_LINE, "hOST: b"))
HOSTS.add("Host with a NUL", head(_LINE, host="Host: a\0b"))
HOSTS.add("Host of 8000", head(_LINE, host="Host: " + "a" * 8000))
HOSTS.add("Host in capitals", head(_LINE, host="HOST: a"))
HOSTS.add("Host last", head(_LINE, "X-A: b", "Host: a", host=None))
HOSTS.add("Host and an absolute target", head("GET http://b/environ HTTP/1.1"))
HOSTS.add("Host for Flask's view", head("GET /flask/environ HTTP/1.1", host="Host: A:1"))
HOSTS.add("bad Host for Flask's view", head("GET /flask/redirect HTTP/1.1", host="Host: a/b?c"))
HOSTS.add("no Host for Flask's view", head("GET /flask/redirect HTTP/1.1", host=None))

_LINES = {
    "plain": "X-A: b",
    "no space": "X-A:b",
    "many spaces": "X-A:    b   ",
    "tabs around": "X-A:\tb\t",
    "a tab within": "X-A: a\tb",
    "no value": "X-A:",
    "only spaces": "X-A:   ",
    "a colon in the value": "X-A: b: c",
    "a colon first in the value": "X-A: :b",
    "obs-text": "X-A: \x80\xff\xe9",
    "UTF-8": "X-A: \xc3\xa9",
    "a CR within": "X-A: a\rb",
    "a CR at the end": "X-A: a\r",
    "an LF within": "X-A: a\nX-B: b",
    "a NUL within": "X-A: a\0b",
    "a control within": "X-A: a\x01b",
    "a form feed within": "X-A: a\x0cb",
    "a form feed at the end": "X-A: a\x0c",
    "a vertical tab first": "X-A: \x0bb",
    "an escape within": "X-A: a\x1bb",
    "a DEL within": "X-A: a\x7fb",
    "NEL at the end": "X-A: a\x85",
    "a no-break space around": "X-A: \xa0a\xa0",
    "no colon": "X-A b",
    "only a name": "X-A",
    "no name": ": b",
    "only a colon": ":",
    "a space before the colon": "X-A : b",
    "a tab before the colon": "X-A\t: b",
    "a space in the name": "X A: b",
    "a space first": " X-A: b",
    "a tab first": "\tX-A: b",
    "quotes in the name": '"X": b',
    "brackets in the name": "X[A]: b",
    "a slash in the name": "X/A: b",
    "an at in the name": "X@A: b",
    "a NUL in the name": "X\0A: b",
    "a DEL in the name": "X\x7f: b",
    "latin-1 in the name": "X-\xe9: b",
    "sharp s in the name": "X-\xdf: b",
    "y with dots in the name": "X-\xff: b",
    "every mark in the name": "!#$%&'*+-.^`|~: b",
    "a digit for a name": "1: b",
    "a dash for a name": "-: b",
    "an underscore in the name": "X_A: b",
    "an underscore for a name": "_: b",
    "a dot in the name": "X.A: b",
    "lower case": "x-a: b",
    "folded": "X-A: b\r\n c",
    "folded by a tab": "X-A: b\r\n\tc",
    "folded to nothing": "X-A: b\r\n ",
    "folded name": "X-A\r\n : b",
    "repeated": "X-A: b\r\nX-A: c\r\nX-B: d\r\nX-A: e",
    "repeated in other letters": "X-A: b\r\nx-a: c",
    "repeated and empty": "X-A:\r\nX-A:",
    "with and without underscore": "X-A: b\r\nX_A: c",
    "bare LF ends it": "X-A: b\nX-B: c",
    "CR CR LF ends it": "X-A: b\r\r\nX-B: c",
    "a request line": "GET / HTTP/1.1",
}
for name, line in _LINES.items():
    FORMS.add(f"field: {name}", head(_LINE, line))
    FORMS.add(f"first field: {name}", head(_LINE, line, "Host: a", host=None))
FORMS.add("bare LFs end the head", "GET /environ HTTP/1.1\nHost: a\n\n")
FORMS.add("a bare LF ends the head", "GET /environ HTTP/1.1\r\nHost: a\r\n\n", half_close=True)
FORMS.add("LF CR LF ends the head", "GET /environ HTTP/1.1\r\nHost: a\n\r\n")
FORMS.add("bare CRs end the head", "GET /environ HTTP/1.1\r\nHost: a\r\r", half_close=True)
FORMS.add("a space on the last line", "GET /environ HTTP/1.1\r\nHost: a\r\n \r\n\r\n")
FORMS.add("the same names as trailers", head(_LINE, "Trailer: X-A", "TE: trailers"))

for count in (98, 99, 100, 120):  # the Host is one more; the limit is 100
    SIZES.add(f"{count} fields and Host", head(_LINE, *(f"X-{number}: b" for number in range(count))))
    SIZES.add(f"{count} equal fields and Host", head(_LINE, *["X-A: b"] * count))
SIZES.add("99 fields and 20 with underscores", head(_LINE, *[f"X-{n}: b" for n in range(99)], *["X_A: b"] * 20))
SIZES.add("20 fields with underscores and 99", head(_LINE, *["X_A: b"] * 20, *[f"X-{n}: b" for n in range(99)]))
for length in (LIMIT - 3, LIMIT - 2, LIMIT - 1, LIMIT, 20_000):  # without the CR LF
    SIZES.add(f"a field of {length}", head(_LINE, "X-A: ".ljust(length, "b")))
    SIZES.add(f"a field of {length} with spaces", head(_LINE, "X-A: b".ljust(length, " ")))
for length in (8188, 8189, 8190, 8191, 8192, 8193, 16383, 16384, 16385, 16386):
    fields = ["X-A: b", *(["X-B: " + "b" * 8000] if length > 16000 else []), "X-C: "]
    whole = head(_LINE, *fields[:-1], "X-C: ".ljust(length - len(head(_LINE, *fields)) + 5, "c"))
    assert len(whole) == length
    SIZES.add(f"a head of {length}", whole)
    SIZES.add(f"a head of {length}, then a request", whole + get(), answers=2)
for length in (127, 128, 129):
    SIZES.add(f"a name of {length}", head(_LINE, "X" * length + ": b"))
SIZES.add("large heads across reads", head(_LINE, "X-A: " + "b" * 5000) * 10, answers=10)
SIZES.add("large heads, bodies across reads", post("/echo", "X-A: " + "b" * 3000, body="c" * 3000) * 10, answers=10)
SIZES.add("a name of 8000", head(_LINE, "X" * 8000 + ": b"))
SIZES.add("a dropped field of 9000", head(_LINE, "X_A: " + "b" * 9000))
SIZES.add("30 fields of 8000", head(_LINE, *(f"X-{number}: " + "b" * 8000 for number in range(30))))
SIZES.add("a field of 30000 without an end", "GET /environ HTTP/1.1\r\nX-A: " + "b" * 30_000, half_close=True)
SIZES.add("300 fields without an end", "GET /environ HTTP/1.1\r\n" + "X-A: b\r\n" * 300, half_close=True)
SIZES.add(
    "a body behind a large head", head("POST /echo HTTP/1.1", "X-A: " + "b" * 8000, "Content-Length: 4") + b"body"
)

_FIELDS = {
    "X-Forwarded-Proto https": ["X-Forwarded-Proto: https"],
    "X-Forwarded-Proto http": ["X-Forwarded-Proto: http"],
    "X-Forwarded-Proto HTTPS": ["X-Forwarded-Proto: HTTPS"],
    "X-Forwarded-Proto list": ["X-Forwarded-Proto: https,http"],
    "X-Forwarded-Proto twice": ["X-Forwarded-Proto: https", "X-Forwarded-Proto: https"],
    "X-Forwarded-Proto contradicted": ["X-Forwarded-Proto: https", "X-Forwarded-Proto: http"],
    "X-Forwarded-Ssl on": ["X-Forwarded-Ssl: on"],
    "X-Forwarded-Ssl off": ["X-Forwarded-Ssl: off"],
    "X-Forwarded-Protocol ssl": ["X-Forwarded-Protocol: ssl"],
    "schemes that contradict": ["X-Forwarded-Proto: https", "X-Forwarded-Ssl: off"],
    "schemes that agree": ["X-Forwarded-Proto: https", "X-Forwarded-Ssl: on", "X-Forwarded-Protocol: ssl"],
    "X_Forwarded_Proto": ["X_Forwarded_Proto: https"],
    "X-Forwarded-For": ["X-Forwarded-For: 1.2.3.4, 5.6.7.8"],
    "X-Forwarded-Host": ["X-Forwarded-Host: b", "X-Forwarded-Port: 1", "X-Forwarded-Prefix: /p"],
    "Forwarded": ["Forwarded: for=1.2.3.4;proto=https;host=b"],
    "X-Real-IP": ["X-Real-IP: 1.2.3.4"],
    "SCRIPT_NAME": ["SCRIPT_NAME: /environ"],
    "SCRIPT-NAME": ["SCRIPT-NAME: /environ"],
    "SCRIPT_NAME that does not fit": ["SCRIPT_NAME: /x"],
    "PATH_INFO": ["PATH_INFO: /x"],
    "PATH-INFO": ["Path-Info: /x"],
    "REMOTE_USER": ["REMOTE_USER: root", "Remote-User: root"],
    "Proxy (httpoxy)": ["Proxy: http://b"],
    "HTTP_HOST": ["HTTP_HOST: b", "HTTP-HOST: b"],
    "wsgi.input": ["wsgi.input: x", "wsgi.url_scheme: https"],
    "headrace.request_id": ["headrace.request_id: x", "headrace.close: 1"],
    "REQUEST-METHOD": ["Request-Method: POST", "Server-Name: b", "Query-String: x"],
    "X-Request-ID": ["X-Request-ID: abc-1.2_3"],
    "X-Request-ID with spaces": ["X-Request-ID:  abc  "],
    "X-Request-ID too odd": ["X-Request-ID: a b<c>"],
    "X-Request-ID too long": ["X-Request-ID: " + "a" * 129],
    "X-Request-ID of 128": ["X-Request-ID: " + "a" * 128],
    "X-Request-ID twice": ["X-Request-ID: a", "X-Request-ID: b"],
    "X-Request-ID empty": ["X-Request-ID:"],
    "X-Request-ID of latin-1": ["X-Request-ID: \xe9"],
    "X_Request_ID": ["X_Request_ID: abc"],
    "Content-Type": ["Content-Type: text/plain"],
    "Content-Type twice": ["Content-Type: text/plain", "Content-Type: text/html"],
    "Content-Type empty": ["Content-Type:"],
    "Content_Type": ["Content_Type: text/plain"],
    "Cookie twice": ["Cookie: a=b", "Cookie: c=d"],
    "Cookie with everything": ['Cookie: a="b;c"; d=\xe9; =; ;'],
    "Authorization": ["Authorization: Basic YTpi"],
    "Accept": ["Accept: */*;q=0.1, text/html", "Accept-Encoding: gzip, br", "Accept-Language: ja"],
    "conditions": ['If-None-Match: "a"', "If-Modified-Since: Mon, 01 Jan 2024 00:00:00 GMT", "Range: bytes=0-1"],
    "X-HTTP-Method-Override": ["X-HTTP-Method-Override: DELETE"],
    "Date": ["Date: today"],
    "Max-Forwards": ["Max-Forwards: 0"],
    "Via": ["Via: 1.1 a, 1.1 b", "Pragma: no-cache", "Cache-Control: no-store"],
    "Content-Encoding": ["Content-Encoding: gzip"],
    "Trailer": ["Trailer: X-A"],
    "TE": ["TE: trailers, deflate;q=0.5"],
}
for name, headers in _FIELDS.items():
    FIELDS.add(f"with {name}", get("/environ", *headers))
FIELDS.add("X-Request-ID on an error", get("/nowhere", "X-Request-ID: abc"))
FIELDS.add("X-Request-ID on a view of Flask's", get("/flask/text", "X-Request-ID: abc"))
FIELDS.add("headers as a handler sees them", get("/headers", "x-b: 2", "X-A: 1", "X-A: 3", "Content-Type: a/b"))
FIELDS.add("cookies as Flask sees them", get("/flask/cookie", "Cookie: name=value"))
FIELDS.add("a compressed body for JSON", post("/json", "Content-Encoding: gzip", body="{}"))
FIELDS.add("a body called identity for JSON", post("/json", "Content-Encoding: Identity", body="{}"))
FIELDS.add("a form", post("/flask/form", "Content-Type: application/x-www-form-urlencoded", body="a=1&b=%C3%A9"))
FIELDS.add("a form with a query", post("/flask/form?q=1", "Content-Type: application/x-www-form-urlencoded", body="a"))
FIELDS.add(
    "raw header bytes",
    b"GET /environ HTTP/1.1\r\nHost: a\r\n" + raw_bytes("X-A: ") + bytes(range(128, 256)) + b"\r\n\r\n",
)

"""A WSGI application that is not ours, with every liberty that WSGI gives and a few that it does not.

What it does is named by the path; any other path gets the environ.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

Environ = dict[str, Any]
Application = Callable[[Environ, Any], Iterable[bytes]]

# Of the connection, or private to a server or a framework.
_LEFT_OUT = ("REMOTE_PORT", "gunicorn.socket", "headrace.", "werkzeug.", "flask.")
_TEXT = [("Content-Type", "text/plain")]
_LATIN = "é\x80"
PAGE = b"0123456789abcdef" * 1000


def application(environ: Environ, start_response: Any) -> Iterable[bytes]:
    return ROUTES.get(environ["PATH_INFO"], _environ)(environ, start_response)


def dump(environ: Environ) -> bytes:
    """What a server has made of a request."""
    told = {key: value for key, value in environ.items() if not key.startswith(_LEFT_OUT)}
    return json.dumps({key: _shown(value) for key, value in told.items()}, sort_keys=True).encode()


def _shown(value: object) -> object:
    if isinstance(value, bool):
        return f"bool {value:d}"  # as long as its opposite
    return value if isinstance(value, (str, int, tuple)) else "an object"


def _environ(environ: Environ, start_response: Any) -> Iterable[bytes]:
    return _answer(start_response, dump(environ))


def _answer(start_response: Any, body: bytes, status: str = "200 OK") -> Iterable[bytes]:
    start_response(status, [*_TEXT, ("Content-Length", str(len(body)))])
    return [body]


def _told(start_response: Any, pieces: Iterable[bytes]) -> Iterable[bytes]:
    return _answer(start_response, json.dumps([piece.decode("latin-1") for piece in pieces]).encode())


# What `wsgi.input` can be asked


def _reads(how: Callable[[Any], Iterable[bytes]]) -> Application:
    def route(environ: Environ, start_response: Any) -> Iterable[bytes]:
        return _told(start_response, how(environ["wsgi.input"]))

    return route


def _echo(environ: Environ, start_response: Any) -> Iterable[bytes]:
    return _answer(start_response, environ["wsgi.input"].read())


def _in_fives(source: Any) -> Iterator[bytes]:
    while piece := source.read(5):
        yield piece
    yield source.read(5)


def _lines(source: Any) -> Iterator[bytes]:
    while line := source.readline():
        yield line


def _short_lines(source: Any) -> Iterator[bytes]:
    while line := source.readline(3):
        yield line


def _mixed(source: Any) -> Iterator[bytes]:
    yield source.read(2)
    yield source.readline()
    yield source.read(0)
    yield source.readline(0)
    yield source.read(1)
    yield from source.readlines()
    yield source.read()
    yield source.readline()


def _sizes(source: Any) -> Iterator[bytes]:
    yield source.read(1)
    yield source.read(None)
    yield source.read(-1)
    yield source.read(1 << 40)


def _into(source: Any) -> Iterator[bytes]:
    if not hasattr(source, "readinto"):
        yield source.read()
        return
    pieces, place = [], bytearray(7)
    while size := source.readinto(memoryview(place)):
        pieces.append(bytes(place[:size]))
    yield b"".join(pieces)


def _negative(source: Any) -> Iterator[bytes]:
    yield source.readline(-1)
    yield source.readline(None)
    yield from source.readlines(2)
    yield source.read(-5)


def _next(source: Any) -> Iterator[bytes]:
    yield next(source)
    yield from source
    yield next(source, b"none")


def _wrong_size(source: Any) -> Iterator[bytes]:
    for size in ("5", 2.5):
        try:
            yield source.read(size)
        except TypeError:
            yield b"TypeError"


def _while_answering(environ: Environ, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", _TEXT)
    yield b"begin "
    yield from _in_fives(environ["wsgi.input"])


# What an application can answer


def _with(status: Any, headers: Any, *body: Any) -> Application:
    def route(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response(status, headers)
        return list(body)

    return route


def _has(*headers: Any) -> Application:
    return _with("200 OK", [*headers, ("Content-Length", "2")], b"ok")


def _writes(environ: Environ, start_response: Any) -> Iterable[bytes]:
    write = start_response("200 OK", _TEXT)
    write(b"written ")
    write(b"")
    return [b"returned"]


def _writes_counted(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Length", "7")])(b"written and cut")
    return []


def _lazy(environ: Environ, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", _TEXT)
    yield b"lazy"


def _many(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", _TEXT)
    return (b"%d," % number for number in range(500))


def _replaces(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("X-First", "1"), ("Content-Length", "9")])
    try:
        raise ValueError
    except ValueError:
        start_response("502 Bad Gateway", _TEXT, sys.exc_info())
    return [b"replaced!"]


def _replaces_late(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", _TEXT)(b"sent")
    try:
        raise ValueError("too late")
    except ValueError:
        start_response("502 Bad Gateway", _TEXT, sys.exc_info())
    return [b"never"]


def _starts_twice(environ: Environ, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", _TEXT)
    start_response("201 Created", _TEXT)
    return [b"never"]


def _never_starts(environ: Environ, start_response: Any) -> Iterable[bytes]:
    return [b"body"]


def _raises(error: BaseException, started: bool = False, sent: bytes = b"") -> Application:
    def route(environ: Environ, start_response: Any) -> Iterable[bytes]:
        if started:
            write = start_response("200 OK", _TEXT)
            if sent:
                write(sent)
        raise error

    return route


def _raises_midway(environ: Environ, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [("Content-Length", "100")])
    yield b"some"
    raise ValueError("midway")


class _Closing:
    """Says afterwards how often it was closed, by the query of its request."""

    closed: ClassVar[Counter[str]] = Counter()

    def __init__(self, query: str, error: Exception | None = None) -> None:
        self._query = query
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        yield b"closing"

    def close(self) -> None:
        _Closing.closed[self._query] += 1
        if self._error is not None:
            raise self._error


def _closes(error: Exception | None = None) -> Application:
    def route(environ: Environ, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Length", "7")])
        return _Closing(environ["QUERY_STRING"], error)

    return route


def _closed(environ: Environ, start_response: Any) -> Iterable[bytes]:
    return _answer(start_response, b"%d" % _Closing.closed.pop(environ["QUERY_STRING"], 0))


def _file(length: str | None = None, skip: int = 0, memory: bool = False) -> Application:
    def route(environ: Environ, start_response: Any) -> Iterable[bytes]:
        file: Any = io.BytesIO(PAGE) if memory else open(__file__, "rb")  # noqa: SIM115  # the server closes it
        file.seek(skip)
        start_response("200 OK", [*_TEXT, *([("Content-Length", length)] if length else [])])
        wrapped: Iterable[bytes] = environ["wsgi.file_wrapper"](file, 1000)
        return wrapped

    return route


def _hints(environ: Environ, start_response: Any) -> Iterable[bytes]:
    environ["wsgi.early_hints"]([("Link", "</style.css>; rel=preload")])
    return _answer(start_response, b"hinted")


def _complains(environ: Environ, start_response: Any) -> Iterable[bytes]:
    environ["wsgi.errors"].write("a complaint\n")
    return _answer(start_response, b"complained")


ROUTES: dict[str, Application] = {
    "/sentinel": lambda environ, start_response: _answer(start_response, b"sentinel"),
    "/echo": _echo,
    "/unread": lambda environ, start_response: _answer(start_response, b"unread"),
    "/read-some": _reads(lambda source: [source.read(3)]),
    "/in-fives": _reads(_in_fives),
    "/lines": _reads(_lines),
    "/short-lines": _reads(_short_lines),
    "/readlines": _reads(lambda source: source.readlines()),
    "/iterates": _reads(iter),
    "/mixed": _reads(_mixed),
    "/sizes": _reads(_sizes),
    "/into": _reads(_into),
    "/negative": _reads(_negative),
    "/next": _reads(_next),
    "/wrong-size": _reads(_wrong_size),
    "/while-answering": _while_answering,
    "/stream": _with("200 OK", _TEXT, b"one", b"", b"two"),
    "/one-piece": _with("200 OK", _TEXT, b"one"),
    "/no-piece": _with("200 OK", _TEXT),
    "/empty-piece": _with("200 OK", _TEXT, b""),
    "/too-long": _with("200 OK", [("Content-Length", "3")], b"12345"),
    "/too-long-in-pieces": _with("200 OK", [("Content-Length", "3")], b"12", b"34", b"5"),
    "/too-short": _with("200 OK", [("Content-Length", "9")], b"12345"),
    "/length-zero": _with("200 OK", [("Content-Length", "0")], b"12345"),
    "/length-twice": _has(("Content-Length", "2")),
    "/length-plus": _with("200 OK", [("Content-Length", "+2")], b"ok"),
    "/length-spaces": _with("200 OK", [("content-length", " 2 ")], b"ok"),
    "/length-word": _with("200 OK", [("Content-Length", "two")], b"ok"),
    "/length-negative": _with("200 OK", [("Content-Length", "-2")], b"ok"),
    "/204": _with("204 No Content", [("Content-Length", "4")], b"body"),
    "/205": _with("205 Reset Content", [], b"body"),
    "/304": _with("304 Not Modified", [("Content-Length", "4"), ("ETag", '"a"')], b"body"),
    "/writes": _writes,
    "/writes-counted": _writes_counted,
    "/lazy": _lazy,
    "/many": _many,
    "/big": _with("200 OK", [("Content-Length", str(len(PAGE) * 20))], PAGE * 20),
    "/replaces": _replaces,
    "/replaces-late": _replaces_late,
    "/starts-twice": _starts_twice,
    "/never-starts": _never_starts,
    "/never-starts-empty": lambda environ, start_response: [],
    "/none": lambda environ, start_response: None,  # type: ignore[dict-item, return-value]
    "/raises": _raises(ValueError("before")),
    "/raises-started": _raises(ValueError("after"), started=True),
    "/raises-sent": _raises(ValueError("late"), started=True, sent=b"sent"),
    "/raises-midway": _raises_midway,
    "/raises-stop": _raises(StopIteration("not this one")),
    "/raises-os": _raises(FileNotFoundError(2, "No such file or directory")),
    "/raises-timeout": _raises(TimeoutError()),
    "/closes": _closes(),
    "/closes-badly": _closes(ValueError("while closing")),
    "/closed": _closed,
    "/file": _file(),
    "/file-length": _file("100"),
    "/file-offset": _file("100", skip=50),
    "/file-offset-no-length": _file(skip=50),
    "/memory-file": _file(memory=True),
    "/hints": _hints,
    "/complains": _complains,
    "/text-piece": _with("200 OK", _TEXT, "text"),
    "/text-piece-later": _with("200 OK", _TEXT, b"bytes", "text"),
    "/number-piece": _with("200 OK", _TEXT, 5),
    "/tuple-headers": _with("200 OK", tuple(_TEXT), b"ok"),
    "/list-header": _has(["X-A", "1"]),
    "/repeated-headers": _has(("Set-Cookie", "a=b"), ("Set-Cookie", "c=d"), ("set-cookie", "e=f")),
    "/header-spaces": _has(("X-A", "  a b \t"), ("X-Empty", "")),
    "/header-latin": _has(("X-A", _LATIN)),
    "/header-beyond-latin": _has(("X-A", "ł")),
    "/header-crlf": _has(("X-A", "a\r\nX-B: b")),
    "/header-lf": _has(("X-A", "a\nb")),
    "/header-nul": _has(("X-A", "a\0b")),
    "/header-del": _has(("X-A", "a\x7fb")),
    "/header-bytes": _has((b"X-A", b"b")),
    "/header-number": _has(("X-A", 5)),
    "/header-name-space": _has(("X A", "b")),
    "/header-name-empty": _has(("", "b")),
    "/header-name-colon": _has(("X:A", "b")),
    "/header-triple": _has(("X-A", "b", "c")),
    "/hop-connection": _has(("Connection", "close")),
    "/hop-keep-alive": _has(("Connection", "keep-alive"), ("Keep-Alive", "timeout=5")),
    "/hop-transfer-encoding": _with("200 OK", [("Transfer-Encoding", "chunked")], b"2\r\nok\r\n0\r\n\r\n"),
    "/hop-upgrade": _has(("Connection", "Upgrade"), ("Upgrade", "websocket")),
    "/hop-upgrade-other": _has(("Connection", "upgrade"), ("Upgrade", "h2c")),
    "/hop-others": _has(("TE", "x"), ("Trailer", "x"), ("Trailers", "x"), ("Proxy-Authenticate", "x")),
    "/own-date": _has(("Date", "today"), ("Server", "mine")),
    "/many-headers": _has(*((f"X-{number}", "v" * number) for number in range(150))),
    "/status-bare": _with("200", _TEXT, b"ok"),
    "/status-space": _with("200 ", _TEXT, b"ok"),
    "/status-odd": _with("299 Odd \xe9 one", _TEXT, b"ok"),
    "/status-crlf": _with("200 OK\r\nX: y", _TEXT, b"ok"),
    "/status-long": _with("2000 OK", _TEXT, b"ok"),
    "/status-word": _with("OK", _TEXT, b"ok"),
    "/status-number": _with(200, _TEXT, b"ok"),
    "/status-bytes": _with(b"200 OK", _TEXT, b"ok"),
    "/status-599": _with("599 Last", _TEXT, b"ok"),
    "/status-999": _with("999 Beyond", _TEXT, b"ok"),
}

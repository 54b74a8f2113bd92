"""The access log, held against gunicorn's own: the same text of any request, and nothing of the user's passed by."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from gunicorn import glogging
from gunicorn.config import Config
from gunicorn.instrument.statsd import Statsd
from hypothesis import given
from hypothesis import strategies as st

from service.access_log import AccessLog, Format, is_ordinary

Pairs = list[tuple[str, Any]]


@dataclass
class Answer:
    status: Any = "200 OK"
    sent: Any = 7
    headers: Pairs = field(default_factory=list)


@dataclass
class Req:
    headers: Pairs = field(default_factory=list)


def environ_of(path: str = "/", **more: Any) -> dict[str, Any]:
    line = {"REQUEST_METHOD": "GET", "RAW_URI": path, "SERVER_PROTOCOL": "HTTP/1.1"}
    return {**line, "PATH_INFO": path, "QUERY_STRING": "", "REMOTE_ADDR": "127.0.0.1", **more}


class Logger(glogging.Logger):  # type: ignore[misc]
    """As far as atoms go, and with one time for both sides. Nothing is set up."""

    def __init__(self) -> None:
        pass

    def now(self) -> str:
        return "[01/Feb/2003:04:05:06 +0000]"

    def debug(self, *args: Any) -> None:
        pass


def gunicorns(form: str, answer: Any, req: Any, environ: dict[str, Any], took: int) -> str:
    log = Logger()
    line: str = form % glogging.SafeAtoms(log.atoms(answer, req, environ, timedelta(microseconds=took)))
    return line


# The text

NAMES = [
    "X-Tag",
    "x-tag",
    "Host",
    "wsgi.input",
    "SERVER_NAME",
    "a b",
    'quoted"',
    "K",
    "\u212a",
]  # the last one is lower `k`
VALUES = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=8),
    st.sampled_from(['"', '\\"', "%", "%(h)s", "%%", "", "-", "é", "two words"]),
    st.sampled_from([None, 0, 1.5, b'"', ("a", '"')]),
)
PAIRS = st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=5)
ATOMS = st.one_of(
    st.sampled_from("hlutrmUqHsBbfaTDMLpXRS"),
    st.sampled_from(["ht", "", " ", "{", "{}", "{}i", "}i", "{host}", "{host}x", "{Host}I", "{host}}i", "{{host}i"]),
    st.builds(
        "{{{}}}{}".format,
        st.sampled_from([*NAMES[:-1], "none", "QUERY_STRING", "query_string"]),
        st.sampled_from("ioeIOEx"),
    ),
)
TEXT = st.sampled_from(["", " ", '"', "%%", "%%(h)s", "|", "é", "[", "(h)s", "{", "\n"])
FORMATS = st.lists(st.one_of(ATOMS.map("%({})s".format), TEXT), max_size=12).map("".join)
AUTHORIZATIONS = st.sampled_from(
    ["Basic dXNlcjpw", "basic dXMiZXI6cA==", "Basic OnA=", "Basic !", "Basic", "Basic /w==", "Bearer x"]
)
ENVIRONS = st.builds(
    lambda base, more, authorization: {**base, **dict(more), **authorization},
    st.fixed_dictionaries(
        {name: VALUES for name in ("REQUEST_METHOD", "RAW_URI", "SERVER_PROTOCOL")},
        optional={
            name: VALUES
            for name in ("PATH_INFO", "QUERY_STRING", "REMOTE_ADDR", "HTTP_REFERER", "HTTP_USER_AGENT", "server_name")
        },
    ),
    PAIRS,
    st.fixed_dictionaries({}, optional={"HTTP_AUTHORIZATION": AUTHORIZATIONS}),
)
ANSWERS = st.builds(
    Answer,
    st.sampled_from(["200 OK", "404 Not Found", "599 ", '200 "fine"', '2"0 x', 200, b"200 OK", None]),
    st.sampled_from([0, 7, 10**12, None]),
    PAIRS,
)
DURATIONS = st.one_of(
    st.integers(0, 3 * 86_400_000_000), st.sampled_from([0, 999, 1000, 999_999, 10**6, 86_400_000_000])
)


@given(FORMATS, ANSWERS, st.builds(Req, PAIRS), ENVIRONS, DURATIONS)
def test_a_line_is_gunicorns_of_any_request_in_any_ordinary_format(
    form: str, answer: Answer, req: Req, environ: dict[str, Any], took: int
) -> None:
    if "%()s" in form:
        assert not is_ordinary(form)
        return
    assert is_ordinary(form)
    made = Format(Logger(), form)
    assert made.line(answer, req, environ, took) == gunicorns(form, answer, req, environ, took)
    assert made.line(Answer(), Req(), environ_of(), 0) == gunicorns(form, Answer(), Req(), environ_of(), 0), "of before"


@given(
    st.lists(st.sampled_from(["%", "(", ")", "h", "s", "{a}i", " ", "5", "d", "%(h)s", "%%", "é"]), max_size=10).map(
        "".join
    )
)
def test_what_is_taken_for_ordinary_reads_as_python_reads_it(form: str) -> None:
    if is_ordinary(form):
        line = Format(Logger(), form).line(Answer(), Req(), environ_of(), 5)
        assert line == gunicorns(form, Answer(), Req(), environ_of(), 5)


def test_the_time_is_asked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    log, clock, asked = Logger(), [100.0], []

    def now() -> str:
        asked.append(clock[0])
        return f'"{len(asked)}"'

    log.now = now
    monkeypatch.setattr("service.access_log.time.time", lambda: clock[0])
    made = Format(log, "%(t)s")
    lines = []
    for at in (100.0, 100.4, 100.9, 101.0, 101.5, 99.0):
        clock[0] = at
        lines.append(made.line(Answer(), Req(), environ_of(), 0))
    assert lines == ['\\"1\\"'] * 3 + ['\\"2\\"'] * 2 + ['\\"3\\"']


# The way out


@dataclass
class Web:
    """The access log of a web process, and what it has asked the hub for."""

    log: Any
    access: AccessLog
    file: Path
    turns: list[Callable[[], None]]

    def say(self, path: str, **environ: Any) -> None:
        self.access.add(Answer(), Req(), environ_of(path, **environ), 5)

    def end_turn(self) -> None:
        turns = self.turns.copy()
        self.turns.clear()
        for callback in turns:
            callback()

    def lines(self) -> list[str]:
        return self.file.read_text().splitlines()


Make = Callable[..., Web]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Sets gunicorn's logging up, by its own means; `beforehand` may change it before the web process looks at it."""
    loggers = [logging.getLogger(name) for name in ("gunicorn.error", "gunicorn.access")]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    turns: list[Callable[[], None]] = []
    opened: list[logging.Handler] = []

    def make(
        form: str = "%(U)s", kind: type = glogging.Logger, beforehand: Callable[[Any], object] | None = None
    ) -> Web:
        file = tmp_path / "access"
        cfg = Config()
        cfg.set("accesslog", str(file))
        cfg.set("access_log_format", form)
        cfg.set("statsd_host", "127.0.0.1:9")
        log = kind(cfg)
        opened.extend(log.access_log.handlers)
        if beforehand is not None:
            beforehand(log)
        return Web(log, AccessLog(log, turns.append), file, turns)

    try:
        yield make
    finally:
        for handler in opened:
            with contextlib.suppress(OSError):
                handler.close()
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate, logger.disabled = handlers, propagate, False
            logger.setLevel(level)
            logger.filters.clear()


def test_the_lines_of_one_turn_leave_together_at_its_end_and_in_order(make: Make) -> None:
    web = make('%(U)s "%(a)s"')
    web.say("/1")
    web.say("/2", HTTP_USER_AGENT='a"gent')
    assert len(web.turns) == 1 and web.lines() == []
    web.end_turn()
    assert web.lines() == ['/1 "-"', '/2 "a\\"gent"']
    web.say("/3")
    assert len(web.turns) == 1
    web.access.flush()
    assert web.lines()[2:] == ['/3 "-"']
    web.end_turn()
    assert len(web.lines()) == 3


def changes() -> list[tuple[str, Callable[[pytest.MonkeyPatch, Any, Any, Any], object]]]:
    """What somebody may do to gunicorn's logger, `logging` and gunicorn's handler."""

    class Record(logging.LogRecord):
        pass

    def otherwise(*args: Any, **kwargs: Any) -> Any:
        return "otherwise"

    def copy_of(value: Any) -> Any:
        """It says of itself that it is the same."""

        def copy(*args: Any, **kwargs: Any) -> Any:
            return value(*args, **kwargs)

        copy.__name__, copy.__qualname__, copy.__module__ = value.__name__, value.__qualname__, value.__module__
        return copy

    found: list[tuple[str, Callable[[pytest.MonkeyPatch, Any, Any, Any], object]]] = [
        ("another handler", lambda m, log, logger, handler: logger.addHandler(logging.NullHandler())),
        ("no handler", lambda m, log, logger, handler: logger.removeHandler(handler)),
        (
            "a handler in its place",
            lambda m, log, logger, handler: m.setattr(logger, "handlers", [logging.NullHandler()]),
        ),
        ("a filter", lambda m, log, logger, handler: logger.addFilter(logging.Filter("none"))),
        ("a filter of the handler", lambda m, log, logger, handler: handler.addFilter(logging.Filter("none"))),
        ("a level", lambda m, log, logger, handler: m.setattr(handler, "level", logging.ERROR)),
        ("a level of the logger", lambda m, log, logger, handler: logger.setLevel("ERROR")),
        ("disabled", lambda m, log, logger, handler: m.setattr(logger, "disabled", True)),
        ("propagating", lambda m, log, logger, handler: m.setattr(logger, "propagate", True)),
        ("a formatter", lambda m, log, logger, handler: handler.setFormatter(logging.Formatter("-%(message)s-"))),
        ("no formatter", lambda m, log, logger, handler: handler.setFormatter(None)),
        ("a stream", lambda m, log, logger, handler: m.setattr(handler, "stream", io.StringIO())),
        ("another logger", lambda m, log, logger, handler: m.setattr(log, "access_log", logging.getLogger("own"))),
        ("not enabled", lambda m, log, logger, handler: m.setattr(log, "_access_log_enabled", False)),
        ("atoms", lambda m, log, logger, handler: m.setattr(log, "atoms_wrapper_class", dict)),
        ("a kind of atoms", lambda m, log, logger, handler: m.setattr(glogging.Logger, "atoms_wrapper_class", dict)),
        ("getting atoms", lambda m, log, logger, handler: m.setattr(glogging.SafeAtoms, "__getitem__", otherwise)),
        ("a class of records", lambda m, log, logger, handler: m.setattr(logging, "_logRecordFactory", Record)),
        (
            "records",
            lambda m, log, logger, handler: m.setattr(logging, "_logRecordFactory", copy_of(logging.LogRecord)),
        ),
    ]
    for owner, names in (
        ("log", ("access", "atoms", "now")),
        ("logger", ("info", "_log", "makeRecord", "handle", "callHandlers")),
        ("handler", ("handle", "emit", "format")),
        ("formatter", ("format",)),
    ):
        for name in names:

            def on_object(m: Any, log: Any, logger: Any, handler: Any, owner: str = owner, name: str = name) -> None:
                own = {"log": log, "logger": logger, "handler": handler, "formatter": handler.formatter}[owner]
                m.setattr(own, name, copy_of(getattr(own, name)))

            def on_class(m: Any, log: Any, logger: Any, handler: Any, owner: str = owner, name: str = name) -> None:
                kind = type({"log": log, "logger": logger, "handler": handler, "formatter": handler.formatter}[owner])
                m.setattr(kind, name, copy_of(getattr(kind, name)))

            found += [(f"{owner}.{name}", on_object), (f"{owner}.{name} of the class", on_class)]
    return found


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in changes()])
def test_whatever_somebody_changes_a_line_goes_gunicorns_way(
    make: Make, monkeypatch: pytest.MonkeyPatch, early: bool, change: Callable[..., object]
) -> None:
    def apply(log: Any) -> None:
        change(monkeypatch, log, log.access_log, log.access_log.handlers[0])

    web = make(beforehand=apply if early else None)
    if not early:
        web.say("/before")
        web.end_turn()
        apply(web.log)
    web.say("/after")
    assert not web.turns


def test_a_change_lasts_as_long_as_it_does_and_no_line_overtakes_another(make: Make) -> None:
    web = make()
    web.say("/1")
    only_even = logging.Filter()
    only_even.filter = lambda record: int(record.getMessage()[1:]) % 2 == 0  # type: ignore[method-assign]
    web.log.access_log.addFilter(only_even)
    web.say("/2")
    assert web.lines() == ["/1", "/2"]
    web.say("/3")
    web.say("/4")
    web.log.access_log.removeFilter(only_even)
    web.end_turn()
    web.say("/5")
    web.end_turn()
    assert web.lines() == ["/1", "/2", "/4", "/5"]
    logging.disable()
    try:
        web.say("/6")
    finally:
        logging.disable(logging.NOTSET)
    web.end_turn()
    assert web.lines()[3:] == ["/5"]


@pytest.mark.parametrize(
    "form", ["%(s)5s", "%(T)d", "%(B)05d|%(m)r", "%(U)-9s|", "%({é}i)s", "%(s)", "%", "%()s", "%(h"]
)
def test_a_format_out_of_the_ordinary_is_gunicorns_to_write(
    make: Make, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    web = make(form)
    web.say("/1")
    assert not web.turns
    try:
        line = gunicorns(form, Answer(), Req(), environ_of("/1"), 5)
    except (ValueError, TypeError):
        assert web.lines() == []
        assert "Logging error" in capsys.readouterr().err
    else:
        assert web.lines() == [line]


@pytest.mark.parametrize("kind", [Statsd, type("Own", (glogging.Logger,), {})])
def test_a_logger_of_another_class_is_told_itself(make: Make, kind: type) -> None:
    web = make(kind=kind)
    web.say("/1")
    assert web.lines() == ["/1"] and not web.turns
    if kind is Statsd:
        web.log.sock.close()


def test_a_logger_of_ones_own_is_told_the_time_it_took(make: Make) -> None:
    told = []

    class Own(glogging.Logger):  # type: ignore[misc]
        def access(self, *args: Any) -> None:
            told.append(args)

    answer, req, environ = Answer(), Req(), environ_of("/1")
    make(kind=Own).access.add(answer, req, environ, 86_400_000_001)
    assert told == [(answer, req, environ, timedelta(days=1, microseconds=1))]


def test_an_environ_that_is_spoilt_is_gunicorns_to_judge(make: Make) -> None:
    web = make("%(r)s")
    with pytest.raises(KeyError, match="REQUEST_METHOD"):
        web.access.add(Answer(), Req(), {}, 5)
    web.say("/1")
    web.end_turn()
    assert web.lines() == ["GET /1 HTTP/1.1"]


def test_waiting_lines_go_to_the_file_that_is_open_when_they_are_written(make: Make) -> None:
    web = make()
    web.say("/1")
    web.end_turn()
    moved = web.file.rename(web.file.with_name("moved"))
    web.say("/2")
    web.log.reopen_files()
    web.end_turn()
    web.say("/3")
    web.end_turn()
    assert moved.read_text() == "/1\n" and web.lines() == ["/2", "/3"]


def test_a_file_that_is_closed_is_opened_again_as_logging_does(make: Make) -> None:
    web = make()
    web.say("/1")
    web.log.access_log.handlers[0].close()
    web.log.access_log.handlers[0]._closed = False
    web.end_turn()
    assert web.lines() == ["/1"]


def test_only_the_line_that_cannot_be_written_is_missing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    web = make()
    handler = web.log.access_log.handlers[0]
    handler.stream.reconfigure(encoding="ascii")
    errors: list[str] = []
    monkeypatch.setattr(handler, "handleError", lambda record: errors.append(record.getMessage()))
    for path in ("/1", "/\xe9", "/3%s"):
        web.say(path)
    web.end_turn()
    assert web.lines() == ["/1", "/3%s"] and errors == ["/\xe9"]


def test_a_disk_that_is_full_is_told_and_breaks_nothing(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    web = make()
    handler = web.log.access_log.handlers[0]
    handler.setStream(open("/dev/full", "a")).close()  # noqa: SIM115  # the fixture closes it
    web.say("/1")
    web.say("/2")
    web.end_turn()
    said = capsys.readouterr().err
    assert said.count("--- Logging error ---") == 1 and "No space left" in said and "/1\\n/2" in said


def test_the_hub_does_not_wait_for_a_thread_that_is_writing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    web = make()
    spawned: list[Callable[[], None]] = []
    monkeypatch.setattr("service.access_log.gevent.spawn", spawned.append)
    has_it, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with web.log.access_log.handlers[0].lock:
            has_it.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait()
    try:
        web.say("/1")
        web.end_turn()
        assert web.lines() == [] and len(spawned) == 1
    finally:
        may_end.set()
        thread.join()
    spawned[0]()
    assert web.lines() == ["/1"]


def test_a_child_of_fork_writes_none_of_its_parents_lines(make: Make) -> None:
    web = make()
    web.say("/parents")
    child = os.fork()
    if child == 0:
        web.end_turn()
        web.say("/childs")
        web.end_turn()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert web.lines() == ["/childs"]
    web.end_turn()
    assert web.lines() == ["/childs", "/parents"]

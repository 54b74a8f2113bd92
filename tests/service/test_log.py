from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service import log
from workers.log import UnblockingHandler


def test_a_pipe_nobody_reads_drops_lines_and_tells_how_many() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    try:
        handler = UnblockingHandler(writer)
        handler.setFormatter(logging.Formatter("%(message)s"))

        def say(text: str) -> None:
            handler.handle(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))

        say("first")
        say("lost")
        say("lost")
        assert os.read(reader, 4096) == b"first\n"
        say("after")
        assert os.read(reader, 4096) == b"2 log lines dropped\nafter\n"
    finally:
        os.close(reader)
        os.close(writer)


def test_lines_of_many_threads_all_arrive_whole(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+") as file:
        handler = UnblockingHandler(file.fileno(), "%(message)s")

        def say(name: int) -> None:
            for number in range(300):
                handler.write([b"%d of %d\n" % (number, name)])

        threads = [threading.Thread(target=say, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted((tmp_path / "log").read_text().splitlines(True)) == sorted(
            f"{number} of {name}\n" for name in range(8) for number in range(300)
        )


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[log.Lines]:
    """The logging of a web process under gevent, put back at the end."""
    headrace = logging.getLogger("headrace")
    before = headrace.handlers, headrace.level, headrace.propagate, log._lines
    with open(tmp_path / "log", "w") as file:
        log.start(file)
        assert log._lines is not None
        log._lines._loop, log._lines._ident, log._lines._thread = object(), int, 0
        yield log._lines
    headrace.handlers, headrace.level, headrace.propagate, log._lines = before


def test_request_lines_pass_logging_by_only_while_nobody_has_a_say_in_them(lines: log.Lines) -> None:
    requests, headrace = logging.getLogger("headrace.request"), logging.getLogger("headrace")
    headrace.handlers = [lines]  # pytest has put its own beside it
    assert lines.takes

    def only_meanwhile(change: Callable[[], object], back: Callable[[], object]) -> None:
        change()
        assert not lines.takes
        back()
        assert lines.takes

    other = logging.NullHandler()
    for logger in (requests, headrace):
        only_meanwhile(
            lambda logger=logger: logger.addHandler(other), lambda logger=logger: logger.removeHandler(other)
        )
    only_meanwhile(lambda: requests.setLevel("ERROR"), lambda: requests.setLevel("NOTSET"))
    only_meanwhile(lambda: lines.setLevel("ERROR"), lambda: lines.setLevel("NOTSET"))
    only_meanwhile(lambda: setattr(requests, "propagate", False), lambda: setattr(requests, "propagate", True))
    only_meanwhile(lambda: setattr(headrace, "propagate", True), lambda: setattr(headrace, "propagate", False))
    own, form = logging.Formatter("%(message)s"), lines.formatter
    only_meanwhile(lambda: lines.setFormatter(own), lambda: lines.setFormatter(form))
    silence = logging.Filter("nothing")
    only_meanwhile(lambda: lines.addFilter(silence), lambda: lines.removeFilter(silence))
    only_meanwhile(lambda: logging.disable(), lambda: logging.disable(logging.NOTSET))


def test_a_child_of_fork_writes_none_of_its_parents_lines(lines: log.Lines, tmp_path: Path) -> None:
    lines._waiting.append(b"the parent's\n")
    child = os.fork()
    if child == 0:
        lines.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "log").read_text() == ""
    lines.flush()
    assert (tmp_path / "log").read_text() == "the parent's\n"


def test_a_closed_reader_costs_no_request() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        UnblockingHandler(writer).handle(logging.LogRecord("x", logging.INFO, "", 0, "text", None, None))
    finally:
        os.close(writer)

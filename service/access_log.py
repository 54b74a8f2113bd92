"""gunicorn's access log at a fraction of its price: the same lines, made of what they show, many in one write.

gunicorn makes a dictionary of all that a line could show and sends it through `logging`, which costs more than many a
request. `Format` is an `access_log_format` taken apart once; `AccessLog` lets the lines wait for the end of the hub's
turn. Both are used only while gunicorn's logger is as gunicorn has set it up, which is asked anew for each line:
whatever somebody has changed, and a format that is out of the ordinary, goes gunicorn's own way.

The gunicorn master loads this module, so it imports nothing of the application. Only greenlets of the hub call it.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import gevent
from gunicorn import glogging

_S = 1_000_000  # in microseconds, as all durations here
_DAY = 86_400 * _S

# What an ordinary format is made of: `%%`, `%(name)s` and text.
_PIECE = re.compile(r"(%%)|%\(([ -'*-~]+)\)s|([^%]+)")
_OF_PAIRS = re.compile(r"\{(.*)\}([ioe])")


class AccessLog:
    """The access log of a web process. `log`: gunicorn's logger, or the user's own. `at_end_of_turn` has the hub call
    something once it is through with what it is at."""

    def __init__(self, log: Any, at_end_of_turn: Callable[[Callable[[], None]], object]) -> None:
        self._log = log
        self._at_end_of_turn = at_end_of_turn
        self._format: Format | None = None
        if _is_gunicorns(log) and is_ordinary(log.cfg.access_log_format):
            self._format = Format(log, log.cfg.access_log_format)
            self._logger = log.access_log
            self._handler = self._logger.handlers[0]
            self._formatter = self._handler.formatter
            self._steps = _steps(log, self._handler)
        self._waiting: list[str] = []
        os.register_at_fork(after_in_child=self._waiting.clear)  # they are the parent's

    def add(self, answer: Any, req: Any, environ: Mapping[str, Any], took: int) -> None:
        """Log a request that is over and took so many microseconds: what gunicorn's `access` does."""
        if self._format is not None and self.is_untouched():
            try:
                line = self._format.line(answer, req, environ, took)
            except Exception:
                pass  # the application has spoilt the environ: gunicorn may do with it what it does
            else:
                self._waiting.append(line)
                if len(self._waiting) == 1:
                    self._at_end_of_turn(self._end_turn)
                return
        self.flush()
        self._log.access(answer, req, environ, timedelta(microseconds=took))

    def flush(self) -> None:
        """Write what waits, in the order it came."""
        if self._waiting:
            self._handler.acquire()
            try:
                self._write()
            finally:
                self._handler.release()

    def _end_turn(self) -> None:
        if not self._waiting:
            return
        lock = self._handler.lock
        if not lock.acquire(blocking=False):
            gevent.spawn(self.flush)  # the hub itself cannot wait
            return
        try:
            self._write()
        finally:
            lock.release()

    def _write(self) -> None:
        lines = self._waiting.copy()
        self._waiting.clear()  # not replaced: a child of fork clears this very list
        stream = self._handler.stream  # of now: SIGUSR1 has it opened anew
        text = "".join([line + self._handler.terminator for line in lines])
        try:
            if stream is not None:
                stream.write(text)
                stream.flush()
                return
        except UnicodeError:
            pass  # nothing of it is written: each by itself, that only those are missing which cannot be
        except Exception:
            self._handler.handleError(self._record(text))
            return
        for line in lines:
            self._handler.handle(self._record(line))

    def _record(self, line: str) -> logging.LogRecord:
        return logging.LogRecord(self._logger.name, logging.INFO, __file__, 0, line, None, None)

    def is_untouched(self) -> bool:
        """Whether what gunicorn and `logging` would make of a line is what is made of it here."""
        if self._format is None:
            return False
        log, logger, handler = self._log, self._logger, self._handler
        return (
            len(logger.handlers) == 1
            and logger.handlers[0] is handler
            and handler.formatter is self._formatter
            and type(handler.stream) is io.TextIOWrapper
            and not (logger.filters or logger.propagate or handler.filters or handler.level)
            and _steps(log, handler) == self._steps
            and logger.isEnabledFor(logging.INFO)
            and log.access_log_enabled
        )


def _is_gunicorns(log: Any) -> bool:
    """Whether a line passes nothing but what gunicorn and `logging` themselves have put there."""
    if type(log) is not glogging.Logger or type(log.access_log) is not logging.Logger or not log.access_log.handlers:
        return False
    handler = log.access_log.handlers[0]
    return (
        type(handler) in (logging.StreamHandler, logging.FileHandler)
        and type(handler.formatter) is logging.Formatter
        and type(handler.formatter._style) is logging.PercentStyle
        and handler.formatter._fmt == "%(message)s"
        and log.atoms_wrapper_class is glogging.SafeAtoms
        and logging.getLogRecordFactory() is logging.LogRecord
        # A patch has the globals of another module, whatever it calls itself.
        and all(
            isinstance(step, type)
            or any(getattr(step, "__globals__", None) is vars(home) for home in (glogging, logging))
            for step in _steps(log, handler)
        )
    )


def _steps(log: Any, handler: Any) -> tuple[object, ...]:
    """What a line passes, each of which may be replaced, on an object or on its class."""
    logger = log.access_log
    return (
        log.access,
        log.atoms,
        log.now,
        log.atoms_wrapper_class,
        glogging.SafeAtoms.__init__,
        glogging.SafeAtoms.__getitem__,
        logger.info,
        logger._log,
        logger.makeRecord,
        logger.handle,
        logger.callHandlers,
        logging.getLogRecordFactory(),
        handler.handle,
        handler.emit,
        handler.format,
        handler.formatter.format,
    )


def is_ordinary(text: object) -> bool:
    """Whether there is no doubt about what a line of this format looks like."""
    return isinstance(text, str) and not _PIECE.sub("", text)


class Format:
    """An ordinary `access_log_format`: pieces of text, and where among them stands what of a request. `log` knows the
    time and the user."""

    def __init__(self, log: Any, text: str) -> None:
        self._log = log
        self._second = -1
        self._now = ""
        self._pieces: list[str] = []
        self._values: list[tuple[int, Callable[[Any, Mapping[str, Any], int], object]]] = []
        # Of the fields of the request, those of the answer, and the environ: where which names have their places.
        self._of_pairs: dict[str, dict[str, list[int]]] = {"i": {}, "o": {}, "e": {}}
        values = {**_VALUES, "t": self._time, "u": self._user}
        for percent, name, literal in _PIECE.findall(text):
            place = len(self._pieces)
            self._pieces.append("%" if percent else literal or "-")  # "-" for as long as nothing is found
            named = _OF_PAIRS.fullmatch(name.lower())
            if named:
                self._of_pairs[named[2]].setdefault(named[1], []).append(place)
            elif name in values:
                self._values.append((place, values[name]))

    def line(self, answer: Any, req: Any, environ: Mapping[str, Any], took: int) -> str:
        """What gunicorn would write of a request, without the end of the line."""
        pieces = self._pieces.copy()
        took %= _DAY  # gunicorn looks at a timedelta's seconds, and not at its days
        for place, value_of in self._values:
            value = value_of(answer, environ, took)
            pieces[place] = value.replace('"', '\\"') if isinstance(value, str) else str(value)
        of_request, of_answer, of_environ = self._of_pairs.values()
        if of_request:
            _fill(pieces, of_request, req.headers)
        if of_answer:
            _fill(pieces, of_answer, answer.headers)
        if of_environ:
            _fill(pieces, of_environ, environ.items())
        return "".join(pieces)

    def _time(self, answer: Any, environ: Mapping[str, Any], took: int) -> object:
        second = int(time.time())
        if second != self._second:
            self._second, self._now = second, self._log.now()
        return self._now

    def _user(self, answer: Any, environ: Mapping[str, Any], took: int) -> object:
        return self._log._get_user(environ) or "-"


def _fill(pieces: list[str], places: Mapping[str, list[int]], pairs: Iterable[tuple[str, object]]) -> None:
    """The last of several of one name counts."""
    for name, value in pairs:
        found = places.get(name.lower())
        if found:
            for place in found:
                pieces[place] = value.replace('"', '\\"') if isinstance(value, str) else str(value)


def _status(answer: Any) -> object:
    status = answer.status
    return status.split(None, 1)[0] if isinstance(status, str) else status


# By gunicorn's names; what has none here is "-", as `l` always is.
_VALUES: dict[str, Callable[[Any, Mapping[str, Any], int], object]] = {
    "h": lambda answer, environ, took: environ.get("REMOTE_ADDR", "-"),
    "r": lambda answer, environ, took: (
        f"{environ['REQUEST_METHOD']!s} {environ['RAW_URI']!s} {environ['SERVER_PROTOCOL']!s}"
    ),
    "s": lambda answer, environ, took: _status(answer),
    "m": lambda answer, environ, took: environ.get("REQUEST_METHOD"),
    "U": lambda answer, environ, took: environ.get("PATH_INFO"),
    "q": lambda answer, environ, took: environ.get("QUERY_STRING"),
    "H": lambda answer, environ, took: environ.get("SERVER_PROTOCOL"),
    "b": lambda answer, environ, took: "-" if answer.sent is None else str(answer.sent),
    "B": lambda answer, environ, took: answer.sent,
    "f": lambda answer, environ, took: environ.get("HTTP_REFERER", "-"),
    "a": lambda answer, environ, took: environ.get("HTTP_USER_AGENT", "-"),
    "T": lambda answer, environ, took: took // _S,
    "D": lambda answer, environ, took: took,
    "M": lambda answer, environ, took: took // 1000,
    "L": lambda answer, environ, took: f"{took // _S}.{took % _S:06d}",
    "p": lambda answer, environ, took: f"<{os.getpid()}>",
}

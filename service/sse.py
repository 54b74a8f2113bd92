"""Server-sent events as bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html). Pure.

`frames` writes the events that a handler makes. `Form` says how the pieces of a model's stream become events, and
`WholeCharacters` reads these pieces as text, whatever boundaries they have.
"""

from __future__ import annotations

import logging
import re
from codecs import utf_8_decode
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass

from workers import strict_json
from workers.errors import PoolError

logger = logging.getLogger("headrace")

_FIELDS = frozenset({"event", "data", "id", "retry"})
_LINE_END = re.compile("\r\n|\r|\n")  # not splitlines: a client ends lines at these three only
_DIGITS = re.compile("[0-9]+")


def frames(events: Iterable[Mapping[str, object]]) -> Generator[bytes, None, None]:
    """One frame per event. A source that fails ends the stream with an `error` event: the status is long sent."""
    try:
        for event in events:
            yield frame(event)
    except Exception as error:  # also of a handler's own generator
        yield failure(error)
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()


def frame(event: Mapping[str, object]) -> bytes:
    """One event with the keys `event`, `data`, `id`, `retry`; a `str` of data goes raw, anything else as JSON."""
    unknown = event.keys() - _FIELDS
    if unknown:
        raise ValueError(f"an event has no field {', '.join(sorted(unknown))}")
    lines = [f"{field}: {_single_line(field, event[field])}" for field in ("event", "id", "retry") if field in event]
    if "data" in event:
        data = event["data"]
        text = data if isinstance(data, str) else strict_json.dumps(data).decode()
        lines += [f"data: {line}" for line in _LINE_END.split(text)]
    return "\n".join([*lines, "", ""]).encode()


def _single_line(field: str, value: object) -> str:
    text = str(value)
    if _LINE_END.search(text) or "\0" in text:
        raise ValueError(f"the {field} of an event must be one line")
    if field == "retry" and not _DIGITS.fullmatch(text):
        raise ValueError("the retry of an event must be a whole number of milliseconds")
    return text


def failure(error: Exception) -> bytes:
    """The last event of a stream that was cut short. What nobody has foreseen is for the log, not for the client."""
    if isinstance(error, PoolError):
        text = str(error).encode("utf-8", "replace").decode()  # a model's own text may hold anything
        return frame({"event": "error", "data": {"error": text, "code": error.code}})
    logger.error("a stream failed", exc_info=error)
    return frame({"event": "error", "data": {"error": "internal error"}})


def token(text: str) -> bytes:
    """A piece as an event named `token`, its data raw."""
    if "\n" in text or "\r" in text:
        return frame({"event": "token", "data": text})
    return f"event: token\ndata: {text}\n\n".encode()


@dataclass(frozen=True, slots=True)
class Form:
    """How the pieces of one kind of stream become events. `piece` makes a frame of each text, or an event for `frame`
    (with `id` or `retry`, if it likes), or b"" for none. `end` closes a stream that is complete, `failed` one that is
    cut short."""

    piece: Callable[[str], bytes | Mapping[str, object]]
    end: bytes = b""
    failed: Callable[[Exception], bytes] = failure

    def frame(self, text: str) -> bytes:
        made = self.piece(text)
        return made if isinstance(made, bytes) else frame(made)


TOKENS = Form(token)


class WholeCharacters:
    """UTF-8 that comes in pieces, as text in whole characters. What is no UTF-8 becomes U+FFFD, once for each try at a
    character, as browsers have it."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes, last: bool = False) -> str:
        """The characters that `piece` completes, perhaps none. `last`: nothing follows, so what is begun is cut off."""
        if self._rest:
            piece = self._rest + piece
        text, used = utf_8_decode(piece, "replace", last)
        self._rest = piece[used:]
        return text

"""Server-sent events as bytes (https://html.spec.whatwg.org/multipage/server-sent-events.html). Pure."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping

from workers import strict_json
from workers.errors import PoolError

logger = logging.getLogger("headrace")

_FIELDS = frozenset({"event", "data", "id", "retry"})
_LINE_END = re.compile("\r\n|\r|\n")  # not splitlines: a client ends lines at these three only


def frames(events: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    """One frame per event. A source that fails ends the stream with an `error` event: the status is long sent."""
    try:
        for event in events:
            yield frame(event)
    except PoolError as error:
        yield frame({"event": "error", "data": {"error": str(error), "code": error.code}})
    except Exception:  # a handler's own generator: its traceback is for the log, not for the client
        logger.exception("a stream failed")
        yield frame({"event": "error", "data": {"error": "internal error"}})
    finally:
        close = getattr(events, "close", None)
        if close is not None:
            close()


def frame(event: Mapping[str, object]) -> bytes:
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
    return text

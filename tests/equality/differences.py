"""What may differ between our worker and gunicorn's own, and why; nothing else may.

Each difference knows what it looks like: `hide` makes two records alike in that one respect and no other. One that is
listed for an entry must be seen there, or the test fails as it does for a difference that is not listed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tests.equality.servers import STOCK
from tests.equality.wire import Answer, Record

Pair = tuple[Record, Record]  # ours and theirs
ASYNC = ("gevent", "gthread")


@dataclass(frozen=True, slots=True)
class Difference:
    """With `entries`, it is allowed in those alone, and in requests made by chance in which `where` is found; it must
    be seen in each entry. Without, it is allowed wherever `hide` recognises it, and must be seen in `witness`."""

    reason: str
    hide: Callable[[Record, Record], Pair]
    workers: tuple[str, ...] = STOCK
    entries: tuple[str, ...] = ()
    where: bytes = b""
    witness: str = ""

    def must_be_seen(self, worker: str, entry: str) -> bool:
        return worker in self.workers and entry in (*self.entries, self.witness)

    def allowed(self, worker: str, entry: str | None, request: bytes) -> bool:
        if worker not in self.workers:
            return False
        if not self.entries or entry is not None:
            return not self.entries or entry in self.entries
        return bool(self.where) and re.search(self.where, request, re.IGNORECASE) is not None


def unexplained(
    ours: Record, theirs: Record, worker: str, entry: str | None, request: bytes = b""
) -> tuple[Pair, list[Difference]]:
    """The two without the differences that are allowed, and which those were. `entry` is the name of one, or None for
    a `request` made by chance."""
    seen = []
    if theirs.end == "reset":
        # To close with bytes unread is to reset, and whether gunicorn has unread ones is a matter of time.
        theirs = replace(theirs, end="closed")
    for difference in DIFFERENCES:
        if ours == theirs:
            break
        if not difference.allowed(worker, entry, request):
            continue
        hidden = difference.hide(ours, theirs)
        if hidden != (ours, theirs):
            seen.append(difference)
            ours, theirs = hidden
    return (ours, theirs), seen


def told(request: bytes, ours: Record, theirs: Record) -> str:
    """A difference for a reader: the request as a Python literal, and on which line of the records it is."""
    literal = repr(request) if len(request) < 2000 else f"{request[:1000]!r} … ({len(request)} bytes)"
    lines = difflib.unified_diff(_lines(ours), _lines(theirs), "ours", "theirs", lineterm="", n=0)
    return "\n".join(["  " + literal, *("  " + line[:500] for line in lines)])


def _lines(record: Record) -> list[str]:
    lines = []
    for number, answer in enumerate(record.answers):
        about = f"{answer.status} {answer.reason} of {answer.version} by {answer.framing}{' cut' * answer.cut}"
        lines += [f"{number}: {line}" for line in (about, *answer.headers, answer.body)]
    return [*lines, f"rest {record.rest!r}", record.end]


# How each looks


def _refusals(ours: Record, theirs: Record) -> Pair:
    return _formless(ours, _ours_refused), _formless(theirs, _gunicorn_refused)


def _formless(record: Record, is_refusal: Callable[[Answer, bytes], bool]) -> Record:
    """A refusal, which is always the last answer, without its reason, headers and body. Of gunicorn's, one to HEAD has
    a body too; ours have none."""
    if not record.answers or record.end != "closed":
        return record
    last = record.answers[-1]
    body = last.body or record.rest
    if last.cut or (last.body and record.rest):
        return record
    if (body or last.framing != "none") and last.header("content-length") != str(len(body)):
        return record
    if not is_refusal(last, body):
        return record
    formless = replace(last, version="", reason="", headers=(), body=b"", framing="refusal")
    return replace(record, answers=(*record.answers[:-1], formless), rest=b"")


_REFUSAL_HEADERS = ["Connection", "Content-Type", "Content-Length"]


def _ours_refused(answer: Answer, body: bytes) -> bool:
    if [name for name, _ in answer.headers] != _REFUSAL_HEADERS or answer.header("connection") != "close":
        return False
    try:
        said = list(json.loads(body)) if body else ["error"]
    except ValueError:
        return False
    return answer.header("content-type") == "application/json" and said == ["error"]


def _gunicorn_refused(answer: Answer, body: bytes) -> bool:
    names = [name for name, _ in answer.headers]
    return names == _REFUSAL_HEADERS and answer.header("connection") == "close" and body.startswith(b"<html>\n")


def _is_refusal(record: Record, *statuses: int) -> bool:
    """Whether the last answer is one that `_refusals` has made formless."""
    return bool(record.answers) and record.answers[-1].framing == "refusal" and record.answers[-1].status in statuses


def _no_answer_of_theirs(ours: Record, theirs: Record) -> Pair:
    if _is_refusal(ours, 500) and not ours.rest and ours.answers[:-1] == theirs.answers:
        return replace(ours, answers=theirs.answers), theirs
    return ours, theirs


def _word_after_the_answer(ours: Record, theirs: Record) -> Pair:
    if len(theirs.answers) == len(ours.answers) + 1 and _is_refusal(theirs, 400, 431) and ours.end == "closed":
        return ours, replace(theirs, answers=theirs.answers[:-1])
    return ours, theirs


def _continue(ours: Record, theirs: Record) -> Pair:
    if 100 in ours.statuses:
        return ours, theirs
    return ours, replace(theirs, answers=tuple(answer for answer in theirs.answers if answer.status != 100))


def _broken_promise(ours: Record, theirs: Record) -> Pair:
    """Theirs has said `keep-alive` and closed; ours has said `close`."""
    if len(ours.answers) == len(theirs.answers) and theirs.end == "closed" and _says_close(ours):
        theirs = replace(theirs, answers=(*theirs.answers[:-1], _closing(theirs.answers[-1])))
    return ours, theirs


def _closed_by_ours(ours: Record, theirs: Record) -> Pair:
    """Ours has said `close` and closed where theirs goes on."""
    count = len(ours.answers)
    if ours.end == "closed" and _says_close(ours) and len(theirs.answers) >= count:
        answers = (*theirs.answers[: count - 1], _closing(theirs.answers[count - 1]))
        return ours, replace(theirs, answers=answers, end="closed")
    return ours, theirs


def _closed_by_sync(ours: Record, theirs: Record) -> Pair:
    """Theirs has given one answer and closed."""
    if theirs.end == "closed" and not ours.answers:
        ours = replace(ours, rest=ours.rest.replace(b"\nConnection: keep-alive\r", b"\nConnection: close\r"))
    finals = [number for number, answer in enumerate(ours.answers) if answer.status >= 200]
    if theirs.end == "closed" and finals:
        answers = (*ours.answers[: finals[0]], _closing(ours.answers[finals[0]]))
        ours = Record(answers, ours.rest if len(finals) == 1 else b"", "closed")
    return ours, theirs


def _single_thread(ours: Record, theirs: Record) -> Pair:
    told = b'"wsgi.multithread": "bool %d"'
    answers = [replace(answer, body=answer.body.replace(told % 0, told % 1)) for answer in theirs.answers]
    return ours, replace(theirs, answers=tuple(answers))


def _no_answer_at_all(ours: Record, theirs: Record) -> Pair:
    """Theirs is no HTTP, with a status of `None`."""
    return ours, ours if not theirs.answers and re.match(rb"HTTP/1\.\d None\r\n", theirs.rest) else theirs


def _says_close(record: Record) -> bool:
    return bool(record.answers) and record.answers[-1].header("connection") == "close"


def _closing(answer: Answer) -> Answer:
    headers = (("Connection", "close") if line == ("Connection", "keep-alive") else line for line in answer.headers)
    return replace(answer, headers=tuple(headers))


def _names(*patterns: str) -> tuple[str, ...]:
    """Names of entries that match."""
    from tests.equality.corpus import ENTRIES

    found: Iterable[str] = (name for name in ENTRIES if any(re.fullmatch(pattern, name) for pattern in patterns))
    return tuple(found)


DIFFERENCES = (
    Difference(
        "what the server itself refuses is JSON here and HTML there; the statuses are the same",
        _refusals,
        witness="one word",
    ),
    Difference(
        "the sync worker answers one request of each connection",
        _closed_by_sync,
        workers=("sync",),
        witness="method GET",
    ),
    Difference(
        "the sync worker has one thread, and says so in the environ",
        _single_thread,
        workers=("sync",),
        witness="method GET",
    ),
    Difference(
        "the sync worker takes an answer that never began for one with a status of None",
        _no_answer_at_all,
        workers=("sync",),
        entries=("WSGI /never-starts", "WSGI /never-starts-empty"),
    ),
    Difference(
        "`100 Continue` is sent when the body is waited for: not before a refusal, nor when the body is there",
        _continue,
        witness="Expect, too large",
    ),
    Difference(
        "an application's OSError or StopIteration is a failure like any other, and is answered",
        _no_answer_of_theirs,
        entries=_names("WSGI (HEAD )?/raises-(stop|os|timeout)( of HTTP/1.0)?"),
        where=rb"raises-",
    ),
    Difference(
        "what is wrong with a body nobody read is found when its request is answered: no second answer follows",
        _word_after_the_answer,
        workers=ASYNC,
        witness="chunks, unread: negative",
    ),
    Difference(
        "what cannot be followed by a request is called closed at once, not promised to stay and then closed",
        _broken_promise,
        workers=ASYNC,
        witness="a body shorter than said",
    ),
    Difference(
        "a rest of a body over 64 KiB is not waited for",
        _closed_by_ours,
        workers=("gevent",),
        entries=_names("a body of (65536|65537|100000|1048576), unread", "a body of 100000 for Flask"),
    ),
    Difference(
        "a body that the handler refuses to look at is not read",
        _closed_by_ours,
        workers=ASYNC,
        entries=("a compressed body for JSON",),
        where=rb"content-encoding",
    ),
    Difference(
        "a body that the client was not told to send, and the handler does not want, is not waited for",
        _closed_by_ours,
        workers=ASYNC,
        entries=("Expect on a 404", "Expect, unread, body at once"),
        where=rb"expect",
    ),
)

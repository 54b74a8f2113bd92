"""However a request is cut into sends, and read piece by piece, it is answered as it is whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equality.corpus import ENTRIES, SUBJECTS
from tests.equality.differences import told
from tests.equality.servers import HEADRACE, Servers
from tests.equality.wire import Record

SPLIT = (
    "method GET",
    "HEAD then GET",
    "target: absolute",
    "an empty line before",
    "two empty lines before",
    "an empty line between",
    "an empty line behind a body",
    "an LF for an end",
    "two Hosts",
    "no Host",
    "field: a CR at the end",
    "field: an underscore in the name",
    "field: bare LF ends it",
    "two lengths: different",
    "Content-Length '+5'",
    "a body longer than said by a request",
    "a body like an end of a head",
    "no length",
    "CL.TE",
    "chunks: an extension",
    "chunks: trailers",
    "chunks, unread: negative",
    "chunks, then a request",
    "mixed: lines",
    "mixed: lines, in chunks",
    "while-answering: five",
    "Connection 'close'",
    "one after another, one unread",
    "Upgrade websocket",
    "POST, GET",
    "unread, GET",
    "good, bad header",
    "good, absolute, good",
    "streamed body, GET",
)

# gunicorn measures the line of a chunk's size only when it has to read more of it.
BY_CHANCE = {"chunks: 9000 digits", "chunks: an extension of 9000"}


@pytest.mark.parametrize("name", SPLIT)
def test_a_request_in_two_pieces_is_answered_as_it_is_whole(servers: Servers, name: str) -> None:
    entry = ENTRIES[name]
    app = "express" if "ours" in entry.apps else "plain"
    whole = servers.record(HEADRACE, app, entry)
    found = []
    for at in range(1, len(entry.parts[0])):
        split = servers.ask(HEADRACE, app, entry, split_at=at)
        if not _alike(whole, split):
            found.append(f"cut at {at}:\n{told(entry.bytes, whole, split)}")
    assert not found, "\n".join([f"{len(found)} cuts of {name}", *found[:5]])


@pytest.mark.parametrize("subject", sorted(set(SUBJECTS) - {"expectations"}))
def test_what_comes_behind_its_head_is_answered_as_if_it_had_come_with_it(servers: Servers, subject: str) -> None:
    found = []
    for entry in SUBJECTS[subject].entries:
        head, blank, rest = entry.parts[0].partition(b"\r\n\r\n")
        if not rest or entry.name in BY_CHANCE:
            continue
        for app in ("express", "plain"):
            if ("ours" if app == "express" else app) in entry.apps:
                whole = servers.record(HEADRACE, app, entry)
                split = servers.ask(HEADRACE, app, entry, split_at=len(head + blank))
                if not _alike(whole, split):
                    found.append(f"{entry.name} ({app}):\n{told(entry.bytes, whole, split)}")
    assert not found, "\n".join([f"{len(found)} entries", *found[:20]])


def _alike(whole: Record, split: Record) -> bool:
    """Once the first piece has been answered and the connection closed, a second one meets a reset."""
    late = split.end == "reset" and whole.end == "closed" and bool(whole.answers)
    return (replace(split, end="closed") if late else split) == whole

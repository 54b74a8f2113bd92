"""However a request is cut into sends, and read piece by piece, it is answered as it is whole."""

from __future__ import annotations

import pytest

from tests.equality.corpus import ENTRIES
from tests.equality.differences import told
from tests.equality.servers import HEADRACE, Servers

SPLIT = (
    "method GET",
    "HEAD then GET",
    "version HTTP/1.0",
    "target: absolute",
    "target: query, encoded",
    "an empty line before",
    "two empty lines before",
    "an empty line between",
    "an empty line behind a body",
    "an LF for an end",
    "CR CR LF for an end",
    "two Hosts",
    "no Host",
    "field: a CR at the end",
    "field: folded",
    "field: an underscore in the name",
    "field: bare LF ends it",
    "LF CR LF ends the head",
    "two lengths: different",
    "Content-Length '+5'",
    "a body longer than said by a request",
    "a body like an end of a head",
    "no length",
    "CL.TE",
    "TE.CL",
    "chunks: an extension",
    "chunks: trailers",
    "chunks: nothing behind the data",
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
    "good, half a body",
    "streamed body, GET",
)


@pytest.mark.parametrize("name", SPLIT)
def test_a_request_in_two_pieces_is_answered_as_it_is_whole(servers: Servers, name: str) -> None:
    entry = ENTRIES[name]
    app = "express" if "ours" in entry.apps else "plain"
    whole = servers.record(HEADRACE, app, entry)
    found = []
    for at in range(1, len(entry.parts[0])):
        split = servers.ask(HEADRACE, app, entry, split_at=at)
        if split != whole:
            found.append(f"cut at {at}:\n{told(entry.bytes, whole, split)}")
    assert not found, "\n".join([f"{len(found)} cuts of {name}", *found[:5]])

"""The corpus: every request we compare by, good, odd and malicious, each with a name, by subject."""

from __future__ import annotations

from tests.equality import corpus_answers, corpus_bodies, corpus_connections, corpus_headers, corpus_lines
from tests.equality.entry import Entry, Subject

SUBJECTS: dict[str, Subject] = {
    **corpus_lines.SUBJECTS,
    **corpus_headers.SUBJECTS,
    **corpus_bodies.SUBJECTS,
    **corpus_connections.SUBJECTS,
    **corpus_answers.SUBJECTS,
}
ENTRIES: dict[str, Entry] = {entry.name: entry for subject in SUBJECTS.values() for entry in subject.entries}

assert len(ENTRIES) == sum(len(subject.entries) for subject in SUBJECTS.values()), "a name is given twice"

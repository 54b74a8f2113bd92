"""Our worker against gunicorn's own: the same bytes in, the same record out, but for `differences.DIFFERENCES`."""

from __future__ import annotations

import pytest

from tests.equality import wire
from tests.equality.corpus import ENTRIES, SUBJECTS
from tests.equality.differences import DIFFERENCES, told, unexplained
from tests.equality.entry import OURS, PLAIN, Entry, get
from tests.equality.servers import APPS, HEADRACE, STOCK, Servers

APPS_COMPARED = {"express": OURS, "plain": PLAIN}


@pytest.mark.parametrize("worker", STOCK)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_our_worker_answers_as_gunicorns_own_do(servers: Servers, subject: str, worker: str) -> None:
    found = [line for entry in SUBJECTS[subject].entries for line in _compared(servers, worker, entry)]
    assert not found, "\n".join([f"{len(found)} of {worker}", *found])


def _compared(servers: Servers, worker: str, entry: Entry) -> list[str]:
    """What is wrong with an entry, in words."""
    wrong = []
    seen = []
    for app, kind in APPS_COMPARED.items():
        if kind in entry.apps:
            both = servers.record(HEADRACE, app, entry), servers.record(worker, app, entry)
            (ours, theirs), explained = unexplained(*both, worker, entry.name)
            seen += explained
            if ours != theirs:
                wrong.append(f"{entry.name} ({app}):\n{told(entry.bytes, ours, theirs)}")
    for difference in DIFFERENCES:
        if difference.must_be_seen(worker, entry.name) and difference not in seen:
            wrong.append(f"{entry.name}: no longer differs in that {difference.reason}")
    return wrong


def test_every_difference_has_an_entry_that_shows_it() -> None:
    for difference in DIFFERENCES:
        names = [name for name in (*difference.entries, difference.witness) if name]
        assert names, difference.reason
        assert set(names) <= set(ENTRIES), difference.reason


@pytest.mark.parametrize("subject", SUBJECTS)
def test_our_worker_never_resets_a_connection(servers: Servers, subject: str) -> None:
    for entry in SUBJECTS[subject].entries:
        for app in APPS:
            if ("ours" if app != "plain" else app) in entry.apps:
                assert servers.record(HEADRACE, app, entry).end != "reset", (entry.name, app)


def test_clients_that_vanish_are_gone_and_the_next_is_answered(servers: Servers) -> None:
    for app in ("express", "plain"):
        for entry in list(ENTRIES.values())[::8]:
            for data in (entry.bytes[:5000], entry.bytes[: len(entry.bytes) // 2][:5000]):
                wire.reset(servers.port(HEADRACE, app), data)
        assert wire.exchange(servers.port(HEADRACE, app), [get()]).statuses == [200]

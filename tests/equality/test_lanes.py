"""The express lane against Flask: one application, once as it is and once with a hook that makes all requests pass
through Flask."""

from __future__ import annotations

import pytest

from tests.equality.corpus import SUBJECTS
from tests.equality.differences import told
from tests.equality.entry import OURS
from tests.equality.servers import HEADRACE, Servers


@pytest.mark.parametrize("subject", [name for name, subject in SUBJECTS.items() if OURS in subject.apps])
def test_the_express_lane_answers_as_flask_does(servers: Servers, subject: str) -> None:
    found = []
    for entry in SUBJECTS[subject].entries:
        express, by_flask = (servers.record(HEADRACE, app, entry) for app in ("express", "by_flask"))
        if express != by_flask:
            found.append(f"{entry.name}:\n{told(entry.bytes, express, by_flask)}")
    assert not found, "\n".join([f"{len(found)} entries", *found])

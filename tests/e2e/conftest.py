"""What the tests with real clients share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.browser import Browser, chromium
from tests.e2e.playing import Playhouse, playhouse


@pytest.fixture(scope="module")
def house() -> Iterator[Playhouse]:
    """A service whose streams the test plays."""
    with playhouse() as house:
        yield house


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def browser(started: Browser, house: Playhouse) -> Iterator[Browser]:
    """On a page that listens to nothing yet. Leaving it leaves nothing."""
    started.open(house.address("/page"))
    yield started
    started.open(house.address("/elsewhere"))
    house.until_free()

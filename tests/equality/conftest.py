from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.equality import servers as servers_of
from tests.equality.servers import Servers


@pytest.fixture(scope="package")
def servers() -> Iterator[Servers]:
    with servers_of.servers() as running:
        yield running

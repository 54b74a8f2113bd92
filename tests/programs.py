"""Programs that some tests drive: a browser, a proxy, curl.

Where one is missing, its tests are skipped, with its name; but not in `.ci/run`, which installs all of them and says so
by `HRTEST_CI`: there a test that does not run has failed.
"""

from __future__ import annotations

import os
import shutil

import pytest

IN_CI = bool(os.environ.get("HRTEST_CI", ""))

# Where Debian has programs for administrators, which is in the path of root only.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def program(name: str) -> str:
    """Its path. Without it, the test that asks ends here."""
    path = shutil.which(name, path=PATH)
    if path is None:
        missing = f"{name} is not installed"
        if IN_CI:
            pytest.fail(missing)
        pytest.skip(missing)
    return path

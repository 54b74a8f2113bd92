"""Who may import whom, seen in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "workers").rglob("*.py")
)
OF_THE_WEB_TIER = {"flask", "werkzeug", "gevent", "gunicorn", "service"}


def loaded_by(module: str) -> set[str]:
    """The top-level packages that are loaded once `module` is imported and nothing else."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_workers_load_nothing_of_the_web_tier(module: str) -> None:
    assert not loaded_by(module) & OF_THE_WEB_TIER


@pytest.mark.parametrize("module", ["service.gunicorn_conf", "service.webworker"])
def test_what_gunicorns_master_loads_leaves_the_application_out(module: str) -> None:
    # What the master has loaded, the web processes forked after a HUP would still run.
    assert not loaded_by(module) & {"flask", "werkzeug"}

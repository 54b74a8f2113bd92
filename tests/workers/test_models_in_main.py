from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_models_of_main_and_closures_are_served(tmp_path: Path) -> None:
    script = Path(__file__).with_name("models_in_main.py")
    command = [sys.executable, str(script), str(tmp_path / "pool.sock")]
    run = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("2.0 7.0\n", 0), run.stderr

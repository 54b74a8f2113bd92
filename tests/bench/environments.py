"""Virtual environments for what Headrace itself does not need, made on first use and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ.get("HEADRACE_BENCH_HOME") or "~/.cache/headrace-bench").expanduser()
MOSEC = ("mosec", "mosec==0.9.8", "numpy")
PY_SPY = ("py-spy", "py-spy")
PATIENCE_S = 300.0


def environment(name: str, *requirements: str) -> Path | None:
    """The directory of the programs of an environment that holds these, or None with a word about why there is none."""
    place = HOME / name
    made = place / "made-of"
    wanted = " ".join([*requirements, f"python=={sys.version.split()[0]}"])
    if not made.exists() or made.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        print(f"making an environment for {name} …", file=sys.stderr, flush=True)
        for command in (
            [sys.executable, "-m", "venv", str(place)],
            [
                str(place / "bin/python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *requirements,
            ],
        ):
            try:
                subprocess.run(command, check=True, timeout=PATIENCE_S, capture_output=True, text=True)
            except (OSError, subprocess.SubprocessError) as error:
                told = str(getattr(error, "stderr", None) or error).strip().splitlines()
                print(f"{name} cannot be had: {told[-1]}", file=sys.stderr, flush=True)
                return None
        made.write_text(wanted)
    return place / "bin"


def py_spy() -> str | None:
    found = shutil.which("py-spy")
    if found is None and (programs := environment(*PY_SPY)) is not None:
        found = str(programs / "py-spy")
    return found

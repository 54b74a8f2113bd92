"""The version of the running code, as `/health` tells it."""

from __future__ import annotations

from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def runtime_version() -> str:
    """The checkout's version when run from one (an installed copy may be older), else the installed one's."""
    metadata = ConfigParser()
    metadata.read(Path(__file__).resolve().parent.parent / "setup.cfg", encoding="utf-8")
    if metadata.get("metadata", "name", fallback="") == "headrace":
        return metadata.get("metadata", "version")
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"

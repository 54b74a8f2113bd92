"""What the environment says about the web tier: every `HEADRACE_…` name, read once, strictly.

A name nobody knows or a value of the wrong kind stops the start: a setting that is silently ignored is worse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "HEADRACE_"

# Read elsewhere: the pool's configuration file, where the pool listens, where its private files are.
ELSEWHERE = frozenset({"HEADRACE_CONFIG", "HEADRACE_POOL_SOCKET", "HEADRACE_RUNTIME_DIR"})


class ConfigError(ValueError):
    """One line, fit for the terminal, that names the setting."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`HEADRACE_` and the field's name in capitals. Times are in seconds, sizes in bytes."""

    bind: str = "127.0.0.1:8080"
    web_workers: int = 2
    graceful_timeout: int = 30
    body_limit: int = 64 * 1024 * 1024
    body_timeout: float = 30.0
    header_timeout: float = 10.0
    send_timeout: float = 30.0
    heartbeat: float = 15.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        kinds = {PREFIX + field.name.upper(): field for field in dataclasses.fields(cls)}
        for name in sorted(environ):
            if name.startswith(PREFIX) and name not in kinds and name not in ELSEWHERE:
                known = ", ".join(sorted({*kinds, *ELSEWHERE}))
                raise ConfigError(f"unknown setting {name} in the environment; known are {known}")
        given = {f.name: _parse(name, environ[name], f.default) for name, f in kinds.items() if name in environ}
        return cls(**given)  # type: ignore[arg-type]  # `_parse` keeps each field's own kind


def _parse(name: str, text: str, default: object) -> str | int | float:
    """`text` as the kind of value `default` is. Every number of ours is above zero."""
    if isinstance(default, str):
        if not text:
            raise ConfigError(f"{name} is empty")
        return text
    kind, number = ("whole number", int) if isinstance(default, int) else ("number", float)
    try:
        value = number(text)
    except ValueError:
        raise ConfigError(f"{name} must be a {kind}, not {text!r}") from None
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"{name} must be a {kind} above 0, not {text!r}")
    return value

"""What the pool serves and with what: read from one TOML file, or declared in Python; checked either way.

    [models.score]
    model = "workers.models.dense:Dense"
    replicas = 2

    [models.score.options]      # the keyword arguments of the model's constructor

    [arena]
    spill_limit = 268435456

A key nobody knows, or a value of the wrong kind or out of range, stops the start with the key's full name: a
limit that is silently ignored is found out by an incident.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from workers.arena import MAX_CLASSES
from workers.model import Model

DEFAULT_FILE = Path(__file__).with_name("default.toml")


class ConfigError(ValueError):
    """One line, fit for the terminal, that names the key and says what would be right."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model. `max_batch` is in rows, `max_queue` in tasks; `timeout_s` is the time a task may take, waiting
    included, `load_timeout_s` the time a replica may take until it is warm; `threads` is how many BLAS and OpenMP
    may use in each replica. `max_streams`: how many streams a replica has under way, the next ones wait in the queue;
    `stream_timeout_s`: the time a stream may take unless its caller says otherwise. `options` are the keyword
    arguments of the model's constructor."""

    name: str
    model: str | type[Model]
    replicas: int = 1
    max_batch: int = 32
    max_delay_ms: float = 0.0
    max_queue: int = 256
    timeout_s: float = 30.0
    load_timeout_s: float = 600.0
    threads: int = 1
    max_streams: int = 5000
    stream_timeout_s: float = 3600.0
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"models.{self.name}: a name is 1 to 128 letters, digits, '.', '_' and '-', "
                "the first of them a letter or digit"
            )
        key = f"models.{self.name}."
        if not isinstance(self.model, type) and not (isinstance(self.model, str) and _PATH.fullmatch(self.model)):
            raise ConfigError(f"{key}model must be of the form package.module:Class, not {_show(self.model)}")
        _whole(f"{key}replicas", self.replicas, 1, 256)
        _whole(f"{key}max_batch", self.max_batch, 1, 4096)
        _number(f"{key}max_delay_ms", self.max_delay_ms, 0, 10_000)
        _whole(f"{key}max_queue", self.max_queue, 1, 16_000)
        _number(f"{key}timeout_s", self.timeout_s, 0.001, 1_000_000)
        _number(f"{key}load_timeout_s", self.load_timeout_s, 0.001, 1_000_000)
        _whole(f"{key}threads", self.threads, 1, 1024)
        _whole(f"{key}max_streams", self.max_streams, 1, 16_000)
        _number(f"{key}stream_timeout_s", self.stream_timeout_s, 0.001, 1_000_000)
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"{key}options must be a table, not {_show(self.options)}")
        for option in self.options:
            if not isinstance(option, str) or not option.isidentifier():
                raise ConfigError(f"{key}options.{option}: an option is a keyword argument, so its name an identifier")


@dataclass(frozen=True, slots=True)
class ArenaConfig:
    """The shared memory of each web process. `slots`: pairs of (bytes of a slot, number of such slots);
    `spill_limit`: bytes of the largest input or output, those over the largest slot getting memory of their own."""

    slots: tuple[tuple[int, int], ...] = ((4096, 8192), (65536, 64), (1048576, 16), (20971520, 2))
    spill_limit: int = 268435456

    def __post_init__(self) -> None:
        if not isinstance(self.slots, tuple) or not 1 <= len(self.slots) <= MAX_CLASSES:
            raise ConfigError(
                f"arena.slots must be 1 to {MAX_CLASSES} pairs of bytes and count, not {_show(self.slots)}"
            )
        below = 0
        for i, pair in enumerate(self.slots):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ConfigError(f"arena.slots[{i}] must be a pair of bytes and count, not {_show(pair)}")
            size, count = pair
            _whole(f"arena.slots[{i}] bytes", size, 4096, 1 << 40)
            _whole(f"arena.slots[{i}] count", count, 1, 1 << 20)
            if size % 4096 or size <= below:
                raise ConfigError(f"arena.slots[{i}] bytes must be a multiple of 4096 and ascend, not {size}")
            below = size
        _whole("arena.spill_limit", self.spill_limit, 4096, 1 << 40)

    @property
    def total_bytes(self) -> int:
        """What the slots take in each web process."""
        return sum(size * count for size, count in self.slots)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    models: tuple[ModelConfig, ...]
    arena: ArenaConfig = field(default_factory=ArenaConfig)

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"models.{name} is declared twice")


def load(path: str | None) -> PoolConfig:
    """The configuration of the TOML file at `path`, or the packaged default, which serves the model `score`."""
    file = DEFAULT_FILE if path is None else Path(path)
    try:
        document = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from None
    try:
        return _parse(document)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _parse(document: dict[str, object]) -> PoolConfig:
    _known("", document, {"models", "arena"})
    models = []
    for name, value in _table("models", document).items():
        key = f"models.{name}"
        table = _table(name, {name: value}, key)
        _known(f"{key}.", table, {f.name for f in fields(ModelConfig)} - {"name"})
        if "model" not in table:
            raise ConfigError(f"{key}.model is required: package.module:Class")
        models.append(ModelConfig(name, **table))  # type: ignore[arg-type]  # checked there, whoever calls
    arena = _table("arena", document)
    _known("arena.", arena, {f.name for f in fields(ArenaConfig)})
    if isinstance(slots := arena.get("slots"), list):
        arena = {**arena, "slots": tuple(tuple(x) if isinstance(x, list) else x for x in slots)}
    return PoolConfig(tuple(models), ArenaConfig(**arena))  # type: ignore[arg-type]


def _table(name: str, parent: dict[str, object], key: str | None = None) -> dict[str, object]:
    value = parent.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key or name} must be a table, not {_show(value)}")
    return value


def _known(prefix: str, table: dict[str, object], known: set[str]) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{prefix}{key} is not a setting; known are {', '.join(sorted(known))}")


def _whole(key: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key} must be a whole number from {low} to {high}, not {_show(value)}")


def _number(key: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"{key} must be a number from {low} to {high}, not {_show(value)}")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

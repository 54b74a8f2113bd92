"""What the pool tells its clients of each model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from workers.model import TensorSpec


class State(StrEnum):
    LOADING = "loading"  # no replica has been ready yet
    READY = "ready"  # at least one replica has loaded and warmed up, and lives
    RESTARTING = "restarting"  # was ready; its queue stays open while replicas come back
    CRASH_LOOPED = "crash-looped"  # replicas die before warm-up, again and again; tried on at long intervals
    REFUSED = "refused"  # the model will not serve, and says why; does not hold readiness back
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model as of the pool's last word. `code` is the code name of a refusal, else empty; `restarts` counts
    replicas that died; times are in seconds. `predicts`, `streams`: what it can be asked for, once it has loaded."""

    name: str
    state: State
    reason: str
    code: str
    replicas: int
    ready: int
    restarts: int
    timeout_s: float
    max_batch: int
    max_queue: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    predicts: bool = True
    streams: bool = False
    stream_timeout_s: float = 3600.0

"""Headrace's compute side: a pool of preloaded processes that share memory with their clients.

    client (web process) ── lease a slot, write the inputs ──▶ arena (memory file, one for each client)
      │        ▲                                                  ▲ outputs written in place
      │        └──── frame (16 bytes, reply pipe) ◀─────────────┐ │
      └─ record (64 bytes) ──▶ queue (pipe, one for each model) ─▶ worker: inbox, batch, predict; live streams, whose
                                                                  pieces follow their frames in the reply pipe
    pool: starts, watches and replaces workers; hands out descriptors; never on the path of a request

Nothing here imports the web tier.
"""

from workers.client import Answer, Future, ThreadClient
from workers.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidInput,
    InvalidOutput,
    ModelFailed,
    ModelNotFound,
    NotReady,
    Overloaded,
    PoolError,
    PoolLost,
    Refused,
    TooLarge,
    WorkerDied,
)
from workers.model import Last, Model, TensorSpec
from workers.pieces import Pieces
from workers.status import ModelStatus, State

__all__ = [
    "Answer",
    "Cancelled",
    "DeadlineExceeded",
    "Draining",
    "Future",
    "InvalidInput",
    "InvalidOutput",
    "Last",
    "Model",
    "ModelFailed",
    "ModelNotFound",
    "ModelStatus",
    "NotReady",
    "Overloaded",
    "Pieces",
    "PoolError",
    "PoolLost",
    "Refused",
    "State",
    "TensorSpec",
    "ThreadClient",
    "TooLarge",
    "WorkerDied",
]

"""Every way a task can fail, as a tree; each leaf has the code that crosses the wire.

    PoolError
    ├── InvalidInput       INVALID_INPUT      the caller's tensors or body do not fit the model
    ├── TooLarge           TOO_LARGE          the caller's body is over the limit
    ├── ModelNotFound      MODEL_NOT_FOUND    no such model
    ├── Refused            (the model's own)  the model will not serve, with a code name of its own
    ├── Overloaded         OVERLOADED         a queue or the arena is full right now
    ├── DeadlineExceeded   DEADLINE_EXCEEDED  the answer did not come in time
    ├── Cancelled          CANCELLED          the caller gave the task up
    ├── ModelFailed        MODEL_FAILED       the model raised, or answered what it had not declared
    ├── InvalidOutput      INVALID_OUTPUT     the answer cannot be written in the form asked for
    ├── WorkerDied         WORKER_DIED        the task's worker died, twice
    ├── NotReady           NOT_READY          loading, or restarting without end
    ├── Draining           DRAINING           the pool is ending
    └── PoolLost           POOL_LOST          no pool

Only code and text cross a process boundary, never an exception object: `from_code` makes the error again on
the other side. Which HTTP status a code has is the web tier's business, not known here.
"""

from __future__ import annotations

import re
from typing import ClassVar


class PoolError(Exception):
    """A task that got no answer. `str(error)` is text for the caller, free of paths and tracebacks."""

    code: str = "MODEL_FAILED"


class InvalidInput(PoolError):
    code = "INVALID_INPUT"


class TooLarge(PoolError):
    code = "TOO_LARGE"


class ModelNotFound(PoolError):
    code = "MODEL_NOT_FOUND"


class Overloaded(PoolError):
    """`retry_after` is in whole seconds, for the header of that name."""

    code = "OVERLOADED"
    retry_after: ClassVar[int] = 1


class DeadlineExceeded(PoolError):
    code = "DEADLINE_EXCEEDED"


class Cancelled(PoolError):
    code = "CANCELLED"


class ModelFailed(PoolError):
    code = "MODEL_FAILED"


class InvalidOutput(PoolError):
    code = "INVALID_OUTPUT"


class WorkerDied(PoolError):
    code = "WORKER_DIED"


class NotReady(PoolError):
    code = "NOT_READY"


class Draining(PoolError):
    code = "DRAINING"


class PoolLost(PoolError):
    code = "POOL_LOST"


class Refused(PoolError):
    """A model's own refusal. A model raises `Refused("a licence is needed", code="LICENSE_FAILED")` in `load`
    (then it is listed with that code and serves nothing) or in `predict` (then that task alone is refused).
    A code is 1 to 64 ASCII letters, digits, `_`, `.` and `-`."""

    def __init__(self, text: str, code: str = "REFUSED") -> None:
        super().__init__(text)
        self.code = code


_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def code_of(error: PoolError) -> str:
    """The error's code name; what a model chose is held to what a header, a log line and a slot can take."""
    return error.code if isinstance(error.code, str) and _CODE.fullmatch(error.code) else ModelFailed.code


_BY_CODE: dict[str, type[PoolError]] = {
    cls.code: cls
    for cls in (
        InvalidInput,
        TooLarge,
        ModelNotFound,
        Overloaded,
        DeadlineExceeded,
        Cancelled,
        ModelFailed,
        InvalidOutput,
        WorkerDied,
        NotReady,
        Draining,
        PoolLost,
    )
}


def from_code(code: str, text: str) -> PoolError:
    """The error that crossed a process boundary as code and text; an unknown code is a model's refusal."""
    cls = _BY_CODE.get(code)
    return cls(text) if cls is not None else Refused(text, code)

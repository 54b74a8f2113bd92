"""A pool client for tests of the web tier: the real codecs and the arithmetic of `score`, in this process."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from workers.codecs import CODECS
from workers.errors import Cancelled, ModelNotFound, PoolError
from workers.model import Array, TensorSpec
from workers.status import ModelStatus, State


def status(name: str = "score", state: State = State.READY, *, reason: str = "", code: str = "") -> ModelStatus:
    return ModelStatus(
        name=name,
        state=state,
        reason=reason,
        code=code,
        replicas=1,
        ready=int(state is State.READY),
        restarts=0,
        timeout_s=5.0,
        max_batch=8,
        max_queue=64,
        inputs=(TensorSpec("features", "float32", (4,)),),
        outputs=(TensorSpec("scores", "float32", (2,)),),
    )


class StubStream:
    """A stream that the test plays: `say` lets pieces come, `end` the end. `granted`: pieces taken when `grant` was
    last called."""

    def __init__(self) -> None:
        self.granted = 0
        self.taken = 0
        self.closed = False
        self._come: deque[bytes] = deque()
        self._over = False
        self._failure: PoolError | None = None
        self._heard: Callable[[], None] | None = None
        self._news = threading.Event()

    def say(self, *pieces: bytes) -> None:
        self._come += pieces
        self._tell()

    def end(self, failure: PoolError | None = None) -> None:
        self._over, self._failure = True, failure
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        if self._heard is not None:
            self._heard()

    @property
    def ended(self) -> bool:
        return self._over and not self._come

    def wait(self, seconds: float | None) -> bool:
        if not self._come and not self._over:
            self._news.clear()
            self._news.wait(seconds)
        return bool(self._come) or self._over

    def take(self) -> list[bytes]:
        pieces = [self._come.popleft() for _ in range(len(self._come))]
        self.taken += len(pieces)
        return pieces

    def grant(self) -> None:
        self.granted = self.taken

    def failure(self) -> PoolError | None:
        return self._failure

    def notify(self, heard: Callable[[], None] | None) -> None:
        self._heard = heard
        if heard is not None and (self._come or self._over):
            heard()

    def close(self) -> None:
        self.closed = True
        if not self._over:
            self._come.clear()
            self.end(Cancelled("the stream was closed"))

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self._come:
            if self._over:
                raise self._failure or StopIteration
            self.wait(None)
        self.taken += 1
        self.granted = self.taken
        return self._come.popleft()


class StubClient:
    """Fails as told: `admission` from `admit`, `prediction` from the two ways to predict, `lost` from `statuses`,
    `refusal` from `stream`. A stream says `pieces` and ends with `cut`, unless `played`: then the test plays it. All
    that were begun are in `streams`."""

    def __init__(self, *models: ModelStatus) -> None:
        self.models = {model.name: model for model in models or (status(),)}
        self.admission: PoolError | None = None
        self.prediction: Exception | None = None
        self.lost: PoolError | None = None
        self.refusal: PoolError | None = None
        self.pieces: list[bytes] = []
        self.cut: PoolError | None = None
        self.played = False
        self.streams: list[StubStream] = []
        self.bodies: list[str] = []
        self.predictions = 0
        self.caller: socket.socket | None = None
        self.started = False
        self.closed = False

    def statuses(self) -> Mapping[str, ModelStatus]:
        if self.lost is not None:
            raise self.lost
        return self.models

    def admit(self, model: str) -> ModelStatus:
        if self.admission is not None:
            raise self.admission
        if model not in self.models:
            raise ModelNotFound(f"no model {model!r}")
        return self.models[model]

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> dict[str, Array]:
        if self.prediction is not None:
            raise self.prediction
        self.predictions += 1
        self.caller = caller
        weights, bias = np.full((2, 4), 0.5, np.float32), np.float32(0.25)
        with np.errstate(over="ignore"):
            return {"scores": inputs["features"] @ weights.T + bias}

    def predict_body(
        self,
        model: str,
        body: bytes,
        codec: str,
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> bytes:
        self.bodies.append(codec)
        spec, chosen = self.models[model], CODECS[codec]
        return chosen.encode(self.predict(model, chosen.decode(body, spec.inputs), caller=caller), spec.outputs)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> StubStream:
        if self.refusal is not None:
            raise self.refusal
        self.admit(model)
        self.caller = caller
        stream = StubStream()
        self.streams.append(stream)
        if not self.played:
            stream.say(*self.pieces)
            stream.end(self.cut)
        return stream

    def start(self) -> None:
        self.started = True

    def wait_introduced(self, seconds: float) -> bool:
        return self.started

    def close(self) -> None:
        self.closed = True

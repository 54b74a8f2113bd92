"""A pool client for tests of the web tier: the real codecs and the arithmetic of `score`, in this process."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import numpy as np

from workers.codecs import CODECS
from workers.errors import ModelNotFound, PoolError
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


class StubClient:
    """Fails as told: `admission` from `admit`, `prediction` from the two ways to predict, `lost` from `statuses`."""

    def __init__(self, *models: ModelStatus) -> None:
        self.models = {model.name: model for model in models or (status(),)}
        self.admission: PoolError | None = None
        self.prediction: Exception | None = None
        self.lost: PoolError | None = None
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

    def start(self) -> None:
        self.started = True

    def wait_introduced(self, seconds: float) -> bool:
        return self.started

    def close(self) -> None:
        self.closed = True

"""The pool as blueprints see it: the one seam between the web tier and the compute processes.

Implemented by `workers.client.ThreadClient` (threads) and `service.hub.HubClient` (gevent); tests may hand
`create_app` one of their own. Every method may be called from any request at any time.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

from workers.model import Array
from workers.status import ModelStatus


class PoolClient(Protocol):
    def statuses(self) -> Mapping[str, ModelStatus]:
        """Every configured model by name, as of the pool's last word. `PoolLost` while there is no pool."""

    def admit(self, model: str) -> ModelStatus:
        """Refuse at once what cannot be taken now, before a body is decoded.

        `ModelNotFound`, `Refused`, `NotReady`, `Draining`, `PoolLost`, or `Overloaded` when the queue is full.
        """

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> dict[str, Array]:
        """Run one task and wait for its answer.

        `inputs`: arrays of shape (rows, *spec.shape). `deadline`: absolute `time.monotonic()` seconds, the
        model's `timeout_s` from now when not given. `caller`: the connection that waits for the answer; when
        its peer is gone the task is cancelled and `Cancelled` raised. Raises any `PoolError`.
        """

    def predict_body(
        self,
        model: str,
        body: bytes,
        codec: str,
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> bytes:
        """As `predict`, but the raw body is decoded, and the answer encoded, in the compute process, by the
        codec of that name (`workers.codecs.CODECS`)."""

    def close(self) -> None:
        """Give everything back; tasks still waited for fail with `PoolLost`."""

"""The pool as blueprints see it: the one seam between the web tier and the compute processes.

Implemented by `workers.client.ThreadClient` (threads) and `service.hub.HubClient` (gevent); tests may hand
`create_app` one of their own. Every method may be called from any request at any time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from workers.errors import PoolError
from workers.model import Array
from workers.status import ModelStatus


class PieceStream(Protocol):
    """A streaming answer as it comes: `wait`, `take`, `grant`, until `ended`; or iterate over it. For one reader at a
    time; `close` may be called by anybody."""

    @property
    def ended(self) -> bool:
        """The end has come, and every piece before it has been taken."""

    def wait(self, seconds: float | None) -> bool:
        """Until there is something to take or the end is known; false after so many seconds without."""

    def take(self) -> list[bytes]:
        """The whole pieces that have come since the last time, maybe none; never waits."""

    def grant(self) -> None:
        """All that was taken so far has been consumed: as much more may be produced."""

    def failure(self) -> PoolError | None:
        """Once ended: why it was cut short; None for a complete one."""

    def notify(self, heard: Callable[[], None] | None) -> None:
        """Have `heard` called in the hub each time something new has come, the end included, and at once if something
        is there already. It must not switch. None: no more of that."""

    def close(self) -> None:
        """Cancel it unless it has ended; nothing is to be taken any more, and nobody waits any longer. Any number of
        times."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes:
        """The next piece, granted as it is handed over; at the end raises the failure, if there is one."""


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

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        deadline: float | None = None,
        caller: socket.socket | None = None,
    ) -> PieceStream:
        """Start one stream. `inputs`: arrays of shape (1, *spec.shape), none for a model without inputs. `deadline`:
        as for `predict`, the model's `stream_timeout_s` from now when not given. Raises at once what is known at
        once; whatever comes later, also `Cancelled` when the peer of `caller` has gone, is the stream's `failure`."""

    def close(self) -> None:
        """Give everything back; tasks still waited for fail with `PoolLost`."""

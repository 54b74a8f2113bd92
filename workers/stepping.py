"""Streams by steps: one call of the model advances all that may go on, whenever each of them began."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from workers.errors import ModelFailed, PoolError
from workers.model import Last, Steps, Stops, answers_of, to_bytes
from workers.records import SlotState

if TYPE_CHECKING:
    from workers.streams import Live, Streams

log = logging.getLogger("headrace.worker")

_DONE, _FAILED = int(SlotState.DONE), int(SlotState.FAILED)


class Stepping:
    def __init__(self, model: Steps, streams: Streams) -> None:
        self._model = model
        self._stopping = model if isinstance(model, Stops) else None
        self._streams = streams
        self._members: dict[Live, None] = {}
        """Who takes part in the next step."""
        self._lives: list[Live] = []
        self._states: tuple[Any, ...] = ()
        self._stale = False

    @property
    def busy(self) -> bool:
        return bool(self._members)

    def begin(self, live: Live) -> None:
        live.data = self._model.start(live.request)
        self.resume(live)

    def resume(self, live: Live) -> None:
        self._members[live] = None
        self._stale = True

    def part(self, live: Live) -> bool:
        self._sit_out(live)
        self._stop(live)
        return True

    def advance(self) -> None:
        """One step."""
        if not self._members:
            return
        if self._stale:
            self._lives = list(self._members)
            self._states = tuple([live.data for live in self._lives])
            self._stale = False
        lives = self._lives
        self._streams.mark_busy()
        try:
            answers = answers_of(self._model.step(self._states), len(lives))
        except BaseException as error:
            # Some states may be half advanced, and nobody knows which.
            failure = self._streams.explain(error)
            for live in lives:
                self._leave(live, failure)
            return
        send = self._streams.send
        for live, answer in zip(lives, answers, strict=True):
            if type(answer) is str:
                try:
                    answer = answer.encode()
                except UnicodeEncodeError as error:
                    self._leave(live, ModelFailed(f"a piece is no text: {error}"))
                    continue
            elif type(answer) is not bytes:
                self._heed(live, answer)
                continue
            if answer and not send(live, answer):
                self._sit_out(live)

    def _heed(self, live: Live, answer: object) -> None:
        """An answer that is not just a piece."""
        if answer is None:
            self._leave(live, None)
            return
        if isinstance(answer, Exception):
            self._leave(live, self._streams.explain(answer))
            return
        try:
            piece = to_bytes(answer.piece if isinstance(answer, Last) else answer)
        except ModelFailed as failure:
            self._leave(live, failure)
            return
        if piece and not self._streams.send(live, piece):
            self._sit_out(live)
        if isinstance(answer, Last):
            self._leave(live, None)

    def _leave(self, live: Live, failure: PoolError | None) -> None:
        self._sit_out(live)
        self._stop(live)
        self._streams.end(live, _DONE if failure is None else _FAILED, failure)

    def _sit_out(self, live: Live) -> None:
        if self._members.pop(live, live) is None:
            # What has left must not be kept until the next step, which may not come for long.
            self._lives, self._states, self._stale = [], (), True

    def _stop(self, live: Live) -> None:
        state, live.data = live.data, None
        if self._stopping is not None:
            self._streams.mark_busy()
            try:
                self._stopping.stop(state)
            except BaseException:
                log.exception("the model failed to stop a stream")

"""Streams by iterators: each runs in a thread of its own, so that one that is slow, or asleep, holds up no other.

A thread puts what it has made into a deque, looks at its stream's `credit` and `verdict`, and waits on its event; all
else is the worker's loop's, which is woken by a descriptor.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from workers.errors import Overloaded
from workers.model import Iterates, pieces_of, to_bytes
from workers.records import PIECE_COST, SlotState

if TYPE_CHECKING:
    from workers.streams import Live, Streams

STACK_BYTES = 1 << 20
_DONE, _FAILED = int(SlotState.DONE), int(SlotState.FAILED)


class Threads:
    def __init__(self, model: Iterates, streams: Streams) -> None:
        self._model = model
        self._streams = streams
        self._made: deque[tuple[Live, bytes | None, BaseException | None]] = deque()
        self._told = False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def busy(self) -> bool:
        return bool(self._made)

    def begin(self, live: Live) -> None:
        live.data = threading.Event()
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(
                target=self._iterate, args=(live,), name=f"headrace stream {live.seq}", daemon=True
            ).start()
        except RuntimeError as error:
            raise Overloaded(f"a thread for the stream cannot be had: {error}") from None
        finally:
            threading.stack_size(before)

    def woken(self) -> None:
        os.eventfd_read(self.wake_fd)
        # Before the look that follows: what is made from now on is told again.
        self._told = False

    def resume(self, live: Live) -> None:
        live.data.set()

    def part(self, live: Live) -> bool:
        live.data.set()
        return False

    def advance(self) -> None:
        """Take what the threads have made."""
        made = self._made
        while made:
            live, piece, error = made.popleft()
            if piece is not None:
                credit = live.credit
                if not live.verdict and self._streams.send(live, piece) and live.credit != credit:
                    live.data.set()
            elif live.verdict:
                if error is not None:
                    self._streams.explain(error)  # into the log; nobody waits for it
                self._streams.end(live, live.verdict)
            elif error is not None:
                self._streams.end(live, _FAILED, self._streams.explain(error))
            else:
                self._streams.end(live, _DONE)

    # In the stream's thread.

    def _iterate(self, live: Live) -> None:
        failure: BaseException | None = None
        made = 0
        try:
            iterator = pieces_of(self._model.stream(live.request))
            try:
                for answer in iterator:
                    piece = to_bytes(answer)
                    if piece:
                        made += len(piece) + PIECE_COST
                        self._tell(live, piece, None)
                        while made >= live.credit and not live.verdict:
                            live.data.wait()
                            live.data.clear()
                    if live.verdict:
                        break
            finally:
                if hasattr(iterator, "close"):
                    iterator.close()
        except BaseException as error:  # asyncio's CancelledError, for one: the loop must hear of any end
            failure = error
        live.request = {}
        self._tell(live, None, failure)
        del failure  # its traceback leads back here: a ring that would keep the inputs mapped

    def _tell(self, live: Live, piece: bytes | None, failure: BaseException | None) -> None:
        self._made.append((live, piece, failure))
        if not self._told:
            self._told = True
            os.eventfd_write(self.wake_fd, 1)

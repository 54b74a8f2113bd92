"""The live streams of a worker: where their records stay, what they may send, how they end.

The worker's loop owns this and calls `turn` between two looks at its queue. How pieces are made is up to the form
of the model's streaming side: by steps (`workers.stepping`) or by iterators in threads (`workers.iterating`).

A stream that has begun ends by its final frame alone, behind its last piece: its state word stays `STREAMING`, and
its record in the inbox until that frame is in the pipe. So if this process dies, the pool finds every stream whose
client may not have heard the end, and none that could be taken for complete without its pieces.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from workers.arena import CHANGED
from workers.errors import PoolError
from workers.inbox import BUSY_SINCE, FINISHED, LIVE, Inbox
from workers.iterating import Threads
from workers.model import Array, Iterates, Steps
from workers.outcomes import Outcomes
from workers.outgoing import Outgoing
from workers.records import CANCEL, CONTROL, CREDIT, PIECE_COST, SlotState
from workers.stepping import Stepping
from workers.tasks import ClientView, HeldTask, gather_inputs

LOOK_NS = 50_000_000
"""How often every stream is looked at, whatever the client's word says, and at its deadline."""
PARKED_MS = 5
"""How often whoever waits for credit, or for room in a reply pipe, is looked at."""
_RUNNING, _STREAMING, _FAILED, _CANCELLED, _EXPIRED = (
    int(SlotState.RUNNING),
    int(SlotState.STREAMING),
    int(SlotState.FAILED),
    int(SlotState.CANCELLED),
    int(SlotState.EXPIRED),
)


class Line:
    """The streams of one client, and the way to it. `seen`: the client's word when they were last looked at. `gone`:
    nothing needs to be sent any more."""

    __slots__ = ("client", "gone", "live", "outgoing", "seen")

    def __init__(self, client: ClientView) -> None:
        self.client = client
        self.live: dict[Live, None] = {}
        self.seen = 0
        self.gone = False
        self.outgoing: Outgoing[Live] = Outgoing(self._write)

    def _write(self, data: bytes) -> bool:
        if self.gone:
            return True
        try:
            os.write(self.client.reply, data)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self.gone = True
        return True


class Live:
    """One stream. `sent`, `credit`: what its pieces have cost, and may. `verdict`: the outcome that has been decided
    on from outside, for a model that is still at it. `request`: its inputs, one row."""

    __slots__ = (
        "at",
        "begun",
        "credit",
        "data",
        "line",
        "over",
        "parked",
        "request",
        "sent",
        "seq",
        "slot",
        "task",
        "verdict",
        "words",
    )

    def __init__(self, task: HeldTask, line: Line) -> None:
        self.task = task
        self.line = line
        self.seq = task.seq
        self.slot = task.slot
        self.words = task.client.arena.words
        self.at = task.base >> 3
        self.credit = self.words[self.at + CREDIT]
        self.sent = 0
        self.begun = self.parked = self.over = False
        self.verdict = 0
        self.request: dict[str, Array] = {}
        self.data: Any = None
        """What the form keeps of it."""


class Form(Protocol):
    """How pieces are made. It calls `Streams.send`, and `Streams.end` unless `part` has said that there is no need."""

    @property
    def busy(self) -> bool:
        """`advance` has something to do now."""

    def begin(self, live: Live) -> None: ...
    def advance(self) -> None: ...
    def resume(self, live: Live) -> None:
        """It has credit again."""

    def part(self, live: Live) -> bool:
        """Nobody wants it any more. True: it has stopped; false: `end` will follow."""


class Streams:
    """`explain`: the error that a model's exception amounts to."""

    def __init__(
        self,
        model: Iterates | Steps,
        inbox: Inbox,
        outcomes: Outcomes,
        explain: Callable[[BaseException], PoolError],
    ) -> None:
        self._inbox = inbox
        self._outcomes = outcomes
        self.explain = explain
        self._free = list(range(inbox.capacity - 1, inbox.front - 1, -1))
        self._places = len(self._free)
        self._lines: dict[ClientView, Line] = {}
        self._parked: set[Live] = set()
        self._late: dict[Live, int] = {}
        self._charged: deque[HeldTask] = deque()
        """Those that were running when a worker died, and have not been begun again."""
        self._trial: Live | None = None
        """The one of them that was begun last."""
        self._next_look = 0
        self._form: Form
        self.threads: Threads | None = None
        if isinstance(model, Steps):
            self._form = Stepping(model, self)
        else:
            self._form = self.threads = Threads(model, self)

    @property
    def free(self) -> int:
        """How many more can be taken."""
        return len(self._free)

    @property
    def none(self) -> bool:
        return len(self._free) == self._places

    @property
    def late_since_ns(self) -> int:
        """Since when a model has not come back from a stream that is to end; 0 if none has kept us waiting. With others
        live beside it, it keeps its place and no more, unless such have taken half of all places."""
        late = len(self._late)
        if late * 2 < self._places and late < self._places - len(self._free):
            return 0
        return min(self._late.values(), default=0)

    @property
    def rest_since_ns(self) -> int:
        """What the worker is busy since while it waits. Beside live threads it always is, since each time it says so:
        one of them may keep the interpreter to itself, which is a task that takes long and not a worker that idles."""
        if self.threads is None or self.none:
            return 0
        return self.late_since_ns or time.monotonic_ns()

    def wait_ms(self) -> int | None:
        """How long there is nothing to do here, unless a thread says otherwise; None: until there is a stream."""
        if self._form.busy:
            return 0
        if self._parked or any([line.outgoing.waiting for line in self._lines.values()]):
            return PARKED_MS
        return None if self.none else LOOK_NS // 1_000_000

    def admit(self, task: HeldTask) -> None:
        """Begin the stream of a record that has just been read; when its turn comes, if a worker has died of it."""
        inbox = self._inbox
        place = self._free.pop()
        inbox.words[LIVE] += 1
        inbox.move(task.entry, place)
        task.entry = place
        if task.charges:
            self._charged.append(task)
            self._try_next()
        else:
            self._begin(task)

    def _try_next(self) -> None:
        """Begin the charged ones one by one, each once the one before has said something or has ended: that which kills
        again takes none of the others along."""
        while self._charged and (self._trial is None or self._trial.begun or self._trial.over):
            self._trial = self._begin(self._charged.popleft())

    def _begin(self, task: HeldTask) -> Live:
        line = self._lines.get(task.client)
        if line is None:
            line = self._lines[task.client] = Line(task.client)
        live = Live(task, line)
        line.live[live] = None
        self.mark_busy()
        live.words[live.at] = live.seq << 8 | _RUNNING
        try:
            live.request = {name: rows[0, ...] for name, rows in gather_inputs([[task]]).items()}
            self._form.begin(live)
        except BaseException as error:
            self.end(live, _FAILED, self.explain(error))
        return live

    def turn(self, now_ns: int) -> None:
        """Let go who has to, let the others advance, and send what they have made."""
        self._look(now_ns)
        if self._charged:
            self._try_next()
        self._form.advance()
        self._flush()

    def drop(self, client: ClientView) -> bool:
        """The client is gone; true once none of its streams is left."""
        self._let_go_charged(lambda task: _CANCELLED if task.client is client else 0)
        line = self._lines.get(client)
        if line is None:
            return True
        line.gone = True
        for live in list(line.live):
            self._part(live, _CANCELLED)
        self._flush()
        return client not in self._lines

    # What the forms call.

    def mark_busy(self) -> None:
        """From now on the model must come back within its time."""
        self._inbox.words[BUSY_SINCE] = self.late_since_ns or time.monotonic_ns()

    def send(self, live: Live, piece: bytes) -> bool:
        """Whether it may go on; if not, `resume` follows."""
        if not live.begun:
            live.begun = True
            live.words[live.at] = live.seq << 8 | _STREAMING
        live.line.outgoing.add_piece(live.seq, live.slot, piece)
        live.sent += len(piece) + PIECE_COST
        return live.sent < live.credit or self.has_credit(live)

    def has_credit(self, live: Live) -> bool:
        live.credit = live.words[live.at + CREDIT]
        if live.sent < live.credit:
            return True
        live.parked = True
        self._parked.add(live)
        return False

    def end(self, live: Live, outcome: int, error: PoolError | None = None) -> None:
        """The model is done with it."""
        live.over = True
        live.request = {}
        live.line.live.pop(live)
        self._parked.discard(live)
        self._late.pop(live, None)
        if live.begun:
            if error is not None:
                self._outcomes.write_failure(live.task, error)
            live.line.outgoing.add_final(live.seq << 8 | outcome, live.slot, live)
            return
        if error is not None:
            self._outcomes.fail(live.task, error)
        else:
            self._outcomes.finish([live.task], outcome)
            self._inbox.words[FINISHED] += 1
        self._leave(live.task)

    # In a turn.

    def _look(self, now_ns: int) -> None:
        """At what clients have said: at all of them now and then, else where something has changed."""
        everything = now_ns >= self._next_look
        if everything:
            self._next_look = now_ns + LOOK_NS
            self._let_go_charged(
                lambda task: _CANCELLED if task.cancelled else _EXPIRED if task.deadline_ns <= now_ns else 0
            )
        for line in self._lines.values():
            words = line.client.arena.words
            changed = words[CHANGED]
            if changed == line.seen and not everything:
                continue
            line.seen = changed
            for live in list(line.live):
                if words[live.at + CONTROL] == live.seq << 8 | CANCEL:
                    self._part(live, _CANCELLED)
                elif everything and live.task.deadline_ns <= now_ns:
                    self._part(live, _EXPIRED)
                elif live.parked and live.sent < (credit := words[live.at + CREDIT]):
                    live.credit = credit
                    live.parked = False
                    self._parked.discard(live)
                    self._form.resume(live)

    def _part(self, live: Live, outcome: int) -> None:
        if live.verdict:
            return
        live.verdict = outcome
        if self._form.part(live):
            self.end(live, outcome)
        else:
            self._late[live] = time.monotonic_ns()

    def _flush(self) -> None:
        for line in list(self._lines.values()):
            for live in line.outgoing.flush():
                self._outcomes.let_go(live.task)
                self._inbox.words[FINISHED] += 1
                self._leave(live.task)
            if not line.live and not line.outgoing.waiting:
                del self._lines[line.client]

    def _let_go_charged(self, verdict: Callable[[HeldTask], int]) -> None:
        """Of those that wait to be begun again, for each with a verdict."""
        for task in list(self._charged):
            if outcome := verdict(task):
                self._charged.remove(task)
                self._outcomes.finish([task], outcome)
                self._leave(task)

    def _leave(self, task: HeldTask) -> None:
        self._free.append(task.entry)
        self._inbox.words[LIVE] -= 1

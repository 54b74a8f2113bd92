"""Which tasks run together. Pure: no clock, no memory, no I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar


class Batchable(Protocol):
    """`group`: equal for tasks whose tensors may be joined. `rows`: along the batch axis. `charges`: how many
    workers have died running it."""

    @property
    def group(self) -> Hashable: ...

    @property
    def rows(self) -> int: ...

    @property
    def charges(self) -> int: ...


T = TypeVar("T", bound=Batchable)


def plan(tasks: Iterable[T], max_rows: int) -> list[list[T]]:
    """Cut what a worker has taken into batches of at most `max_rows` rows and of one group each.

    A task that was running when its worker died runs alone, and after the others: if it kills again, it takes
    nobody along.
    """
    batches: list[list[T]] = []
    filling: dict[Hashable, tuple[list[T], int]] = {}
    alone: list[list[T]] = []
    for task in tasks:
        if task.charges:
            alone.append([task])
            continue
        batch, rows = filling.get(task.group, (None, 0))
        if batch is None or rows + task.rows > max_rows:
            batch, rows = [], 0
            batches.append(batch)
        batch.append(task)
        filling[task.group] = batch, rows + task.rows
    return batches + alone


def gather_until(oldest_queued_ns: int, held: int, max_batch: int, max_delay_ns: int) -> int:
    """Until when to wait for more records; 0 when the batch is full. Counted from when the oldest was queued, so
    that a task which has waited behind another batch does not wait again."""
    return 0 if held >= max_batch else oldest_queued_ns + max_delay_ns

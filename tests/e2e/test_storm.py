"""Any process killed at any moment: no wrong answer, nobody else's request lost, no slot stuck."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest

from tests.e2e.clients import TAG, Clients, tagging
from tests.e2e.stack import Stack, every_web_process, fds, kill, service
from tests.lengths import SEED, STORM_S
from tests.service.serving import until

BACK_S = 10.0


def kill_a_worker(stack: Stack, clients: Clients, dice: random.Random) -> None:
    worker = dice.choice(stack.compute())
    kill(worker)
    until(lambda: len(set(stack.compute()) - {worker}) == 2, "the worker is replaced", BACK_S)


def kill_the_pool(stack: Stack, clients: Clients, dice: random.Random) -> None:
    before = clients.tolerated
    # Whoever was with it is told so, and whoever comes before the next one has loaded.
    clients.tolerated = no_pool
    pool = stack.pool()
    kill(pool)
    # What is being killed may still be seen, and be believed in.
    until(lambda: bool(set(stack.pools()) - {pool}) and stack.all_ready(), "the pool is back", BACK_S)
    clients.tolerated = before


def no_pool(code: str) -> bool:
    return code in ("POOL_LOST", "NOT_READY")


def kill_a_web_process(stack: Stack, clients: Clients, dice: random.Random) -> None:
    pid = dice.choice(stack.web())
    clients.killed[pid] = time.monotonic()
    kill(pid)
    until(lambda: len(stack.web()) == 2 and pid not in stack.web(), "the web process is replaced", BACK_S)


def kill_the_tracker(stack: Stack, clients: Clients, dice: random.Random) -> None:
    """A process that `multiprocess` starts beside the workers; it starts another when it wants one."""
    for pid, title in stack.titles().items():
        if "resource_tracker" in title:
            kill(pid)
    kill_a_worker(stack, clients, dice)


def kill_the_guardian(stack: Stack, clients: Clients, dice: random.Random) -> None:
    before = guardians(stack)
    for pid in before:
        kill(pid)
    until(lambda: bool(guardians(stack) - before), "the guardian is replaced", BACK_S)


def guardians(stack: Stack) -> set[int]:
    return {pid for pid, title in stack.titles().items() if title == "headrace guardian"}


KILLS = {
    "a worker": kill_a_worker,
    "the pool": kill_the_pool,
    "a web process": kill_a_web_process,
    "the guardian": kill_the_guardian,
}
ALL = [*KILLS.values(), kill_the_tracker]


@pytest.mark.parametrize("victim", [*KILLS, "anything"])
def test_kills_at_random_moments_cost_nobody_else_a_request(victim: str) -> None:
    print(f"seed {SEED}")
    dice = random.Random(SEED)
    kills: list[Callable[[Stack, Clients, random.Random], None]]
    kills = ALL if victim == "anything" else [KILLS[victim]]
    with service({"tag": TAG}) as stack:
        rested = fds(stack.pool())
        with tagging(stack) as clients:
            ends, count = time.monotonic() + STORM_S, 0
            while time.monotonic() < ends or count < 3:
                moment = time.monotonic() + dice.uniform(0.0, 0.3)
                until(lambda moment=moment: time.monotonic() >= moment, "the moment of the kill")  # type: ignore[misc]
                dice.choice(kills)(stack, clients, dice)
                count += 1
            # What was sent before the last kill has an answer, and the service is what it was.
            answered = clients.right
            until(lambda: clients.right > answered + 100, f"answers go on (seed {SEED})")
        assert clients.right > 100
        until(stack.all_ready, "every web process is ready")
        until(lambda: slots_out(stack) == [0, 0], f"no slot is out (seed {SEED})")
        until(lambda: fds(stack.pool()) == rested, f"the pool holds what it held (seed {SEED})")


def slots_out(stack: Stack) -> list[int]:
    answers = every_web_process(stack, "/slots").values()
    return [json.loads(body)["leased"] if status == 200 else -1 for status, _, body in answers]


def test_a_killed_master_takes_everything_with_it_and_the_port_is_free_at_once() -> None:
    with service({"tag": TAG}) as stack, tagging(stack) as clients:
        until(lambda: clients.right > 100, "load")
        processes = [*stack.web(), *stack.compute(), stack.pool()]
        assert len(processes) == 5
        clients.stopping, clients.tolerated = True, no_pool
        clients.closed_upon = 8  # web processes that lose their master on a busy machine: one for each client
        kill(stack.master)
        stack.process.wait()
        # The next start does not wait for the rests of the last.
        with service({"tag": TAG}, directory=stack.directory, port=stack.port, ready=False) as again:
            until(lambda: not set(processes) & set(again.titles()), "the old processes have gone", 4.0)
            again.wait_ready()
            assert again.predict("tag", nonce=5)[2] == b'{"nonce":5}'

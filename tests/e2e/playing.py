"""Streams that a test plays, piece by piece: the next one is not made before the test has seen the last."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import Stack, every_web_process, place, service
from tests.service.serving import until

APP = "tests.e2e.played_app:server"
MODEL = "played"
WAYS = ("/played", "/flask/played")  # sent from the hub; iterated over
FAREWELL = "farewell"
RETRY_MS = 20

_numbers = itertools.count(1)


@dataclass
class Playhouse:
    """A service whose streams are played."""

    stack: Stack
    place: Path

    def script(self, *lines: object) -> Script:
        script = Script(self.place, next(_numbers))
        script.add(*lines)
        return script

    @property
    def port(self) -> int:
        return self.stack.port

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def told(self) -> tuple[int, int]:
        """How many streams are live in compute, and how many pieces have been made."""
        answer = json.loads(self.stack.predict(MODEL, script=0, begin=0)[2])
        return answer["live"], answer["made"]

    def slots(self) -> int:
        """How many slots are out in all web processes."""
        return sum(json.loads(body)["leased"] for _, _, body in every_web_process(self.stack, "/slots").values())

    def until_live(self, count: int = 1) -> None:
        until(lambda: (self.told()[0], self.slots()) == (count, count), f"{count} streams are live, each in its slot")

    def until_free(self, seconds: float = 2.0) -> None:
        """No patience: an end that only a heartbeat or a time limit brings about comes later than this."""
        until(lambda: (self.told()[0], self.slots()) == (0, 0), "no stream is live and every slot is free", seconds)


@dataclass
class Script:
    """The lines that `tests.e2e.played` plays."""

    place: Path
    number: int

    def add(self, *lines: object) -> None:
        with (self.place / str(self.number)).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def at(self, route: str) -> str:
        return f"{route}?script={self.number}"


END = None


def fail(why: str) -> dict[str, str]:
    return {"fail": why}


@contextlib.contextmanager
def playhouse(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Playhouse]:
    with place() as scripts:
        table = {"model": "tests.e2e.played:Played", "options": {"place": str(scripts)}}
        score = {"model": "workers.models.dense:Dense"}
        with service({MODEL: table, "score": score}, *flags, app=APP, web=1, env=env) as stack:
            until(stack.all_ready, "every web process knows")
            yield Playhouse(stack, scripts)

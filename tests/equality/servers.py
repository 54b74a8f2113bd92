"""The servers that are compared: each worker class with each application, a gunicorn of its own, one web process."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence

from tests.equality import wire
from tests.equality.entry import Entry, get
from tests.equality.wire import Record
from tests.service.serving import listening_port, start, stop

APPS = {
    "express": "tests.equality.apps:express",
    "by_flask": "tests.equality.apps:by_flask",
    "plain": "tests.equality.plain:application",
}
HEADRACE = "headrace"
FLAGS: dict[str, Sequence[str]] = {
    HEADRACE: ("-k", "service.webworker.HeadraceWorker"),
    "gevent": ("-k", "gevent"),
    "gthread": ("-k", "gthread", "--threads", "4"),
    "sync": ("-k", "sync"),
}
STOCK = ("gevent", "gthread", "sync")


class Servers:
    """`record` asks a server once for each entry, and remembers."""

    def __init__(self, ports: dict[tuple[str, str], int]) -> None:
        self._ports = ports
        self._records: dict[tuple[str, str, str], Record] = {}

    def port(self, worker: str, app: str) -> int:
        return self._ports[worker, app]

    def record(self, worker: str, app: str, entry: Entry) -> Record:
        key = (worker, app, entry.name)
        if key not in self._records:
            try:
                self._records[key] = self.ask(worker, app, entry)
            except wire.Silence as silence:
                raise wire.Silence(f"{worker} with {app}, {entry.name}: {silence}") from None
        return self._records[key]

    def ask(self, worker: str, app: str, entry: Entry, split_at: int | None = None) -> Record:
        return wire.exchange(
            self.port(worker, app),
            entry.parts,
            answers=1 if worker == "sync" else entry.answers,
            half_close=entry.half_close,
            bodiless=entry.bodiless,
            split_at=split_at,
        )


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """Every worker with `express` and `plain`; `by_flask` is compared on our worker alone. All start side by side."""
    wanted = [(worker, app) for worker in FLAGS for app in APPS if app != "by_flask" or worker == HEADRACE]
    with contextlib.ExitStack() as ends:
        started = []
        for worker, app in wanted:
            stderr = ends.enter_context(tempfile.TemporaryFile())
            process = start(APPS[app], *FLAGS[worker], stderr=stderr)
            ends.callback(stop, process)
            started.append((process, stderr))
        ports = {key: listening_port(*pair) for key, pair in zip(wanted, started, strict=True)}
        for port in ports.values():
            assert wire.exchange(port, [get()]).statuses == [200]  # its web process is there
        yield Servers(ports)
        for process, _ in started:
            process.terminate()  # all at once, each is waited for by `stop`

"""Real pools for tests: `python -m workers` as a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from workers.control import queue_depth
from workers.core import ClientCore
from workers.errors import PoolError
from workers.status import ModelStatus, State

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 20.0
SMALL_ARENA = {"slots": [[4096, 256], [65536, 16], [1048576, 2]], "spill_limit": 16 << 20}
"""Little enough that a client connects in no time, and that its limits are soon met."""

Models = Mapping[str, Mapping[str, object]]


class PoolProcess:
    """A pool under way. `models`: for each name its configuration table; `model` is a class of `tests.models.zoo`, or
    names its module too."""

    def __init__(self, directory: Path, models: Models, arena: Mapping[str, object] = SMALL_ARENA) -> None:
        self.directory = directory
        self.socket_path = str(directory / "pool.sock")
        self._config = directory / "headrace.toml"
        self._config.write_text(toml(models, arena))
        self._log = directory / "pool.log"
        self.start()

    def start(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ |= {
            "HEADRACE_POOL_SOCKET": self.socket_path,
            "HEADRACE_CONFIG": str(self._config),
            "PYTHONPATH": str(ROOT),
        }
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers"], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stderr=log
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self._log.read_text()

    def held(self) -> int:
        """How many descriptors and mapped files it has, once it is done with what it was just at."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as newcomer:
            newcomer.connect(self.socket_path)
            # It has one thread, which is now with the newcomer.
            assert newcomer.recv(4096)
            return len(targets(self.pid)) - 1

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Whatever state it is in."""
        pids = [*tree(self.pid), self.pid] if self.process.poll() is None else []
        for pid in pids:
            send(pid, signal.SIGCONT)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        until(lambda: not any(alive(pid) for pid in pids), "the pool has left nothing behind")

    def workers(self, model: str) -> list[int]:
        """Pids of the model's live workers, by index. Only such as have taken their place."""
        titles = {title(pid): pid for pid in children(self.pid) if alive(pid)}
        prefix = f"headrace worker {model}["
        return [titles[name] for name in sorted(titles) if name.startswith(prefix)]

    def worker(self, model: str) -> int:
        (pid,) = self.workers(model)
        return pid


@contextlib.contextmanager
def pool(models: Models, arena: Mapping[str, object] = SMALL_ARENA) -> Iterator[PoolProcess]:
    with tempfile.TemporaryDirectory(prefix="headrace-test-") as directory:
        running = PoolProcess(Path(directory), models, arena)
        try:
            yield running
        except BaseException:
            print(running.log()[-10_000:], file=sys.stderr)
            raise
        finally:
            running.stop()


def toml(models: Models, arena: Mapping[str, object]) -> str:
    """JSON's numbers, strings and lists are also TOML's."""
    lines = ["[arena]", *(f"{key} = {json.dumps(value)}" for key, value in arena.items())]
    for name, table in models.items():
        lines.append(f"[models.{name}]")
        for key, value in table.items():
            if key == "model" and ":" not in str(value):
                value = f"tests.models.zoo:{value}"
            if key != "options":
                lines.append(f"{key} = {json.dumps(value)}")
        lines.append(f"[models.{name}.options]")
        options = table.get("options", {})
        assert isinstance(options, dict)
        lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    return "\n".join(lines)


# Clients.


def statuses(client: object) -> Mapping[str, ModelStatus]:
    """What the client knows of the models; nothing while there is no pool."""
    try:
        return client.statuses()  # type: ignore[attr-defined,no-any-return]
    except PoolError:
        return {}


def wait_state(client: object, state: State, *models: str) -> None:
    """Until each of `models` is in `state`."""

    def there() -> bool:
        seen = statuses(client)
        return all(name in seen and seen[name].state is state for name in models)

    until(there, f"{', '.join(models)} {state.value}: {statuses(client)}")


def wait_replicas(client: object, *models: str) -> None:
    """Until each of `models` has all its replicas."""

    def there() -> bool:
        seen = statuses(client)
        return all(name in seen and seen[name].ready == seen[name].replicas for name in models)

    until(there, f"all replicas of {', '.join(models)}: {statuses(client)}")


def core(client: object) -> ClientCore:
    connection = client._connection  # type: ignore[attr-defined]
    assert connection is not None and connection.core is not None
    found: ClientCore = connection.core
    return found


def wait_free(client: object) -> None:
    """Until no slot is out."""
    until(lambda: (core(client).leased, core(client).under_way) == (0, 0), "every slot is free again")


def states(client: object) -> list[int]:
    """Of the tasks under way, as their slots have it."""
    inside = core(client)
    return [inside.arena.words[task.base >> 3] & 0xFF for task in list(inside._tasks.values())]


def queued(client: object, model: str) -> int:
    """Records that wait in a model's queue."""
    return queue_depth(client._connection._queues[model])  # type: ignore[attr-defined]


# Processes.


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Wait for a condition, looking often."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """A child of fork that does nothing but hold what it has got, until the block ends."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(child, 0)


def children(pid: int) -> list[int]:
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [int(child) for child in task.read_text().split()]
    return pids


def tree(pid: int) -> list[int]:
    """Every descendant, children before their parents."""
    return [found for child in children(pid) for found in (*tree(child), child)]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def state_of(pid: int) -> str:
    """One letter, as in `ps`; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def targets(pid: int) -> list[str]:
    """What its descriptors lead to, and which files it has mapped."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return found + [fields[5] for line in lines if len(fields := line.split(None, 5)) == 6]


def arenas(pid: int) -> int:
    """Arenas that the process has mapped."""
    return sum("headrace-arena" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def spills(pid: int) -> list[str]:
    """Spills that the process has open or mapped."""
    return [target for target in targets(pid) if "headrace-spill" in target]


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

"""The whole service for tests, as its users run it: real gunicorn, its embedded pool, real sockets and signals.

Every service gets a directory of its own as its working directory. All its processes keep that, whoever their
parent becomes, so the directory tells which processes are ours: they are found by it, and ended by pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.service.serving import PATIENCE_S, Client, Served, listening_port, start, until

BUILT_IN = "service:create_app()"
APP = "tests.e2e.apps:server"
ZOO = "tests.models.zoo:"
SCORE: dict[str, object] = {"model": "workers.models.dense:Dense"}
SMALL_ARENA: list[list[int]] = [[4096, 64], [65536, 8], [1048576, 4]]

Models = Mapping[str, Mapping[str, object]]
Response = tuple[int, dict[str, str], bytes]


@dataclass
class Stack(Served):
    directory: Path

    # Its processes, by role.

    @property
    def master(self) -> int:
        return self.process.pid

    def titles(self) -> dict[int, str]:
        return titles(self.directory)

    def web(self) -> list[int]:
        return [pid for pid, title in self.titles().items() if title.startswith("gunicorn: worker")]

    def pools(self) -> list[int]:
        return [pid for pid, title in self.titles().items() if title == "headrace pool"]

    def pool(self) -> int:
        (pool,) = self.pools()
        return pool

    def compute(self, model: str = "") -> list[int]:
        start = f"headrace worker {model}" + ("[" if model else "")
        return [pid for pid, title in self.titles().items() if title.startswith(start)]

    # Waiting.

    def ready(self) -> bool:
        try:
            with self.connect() as client:
                return ask(client, "/ready")[0] == 200
        except OSError:
            return False

    def all_ready(self) -> bool:
        """Every web process says so, each of which hears of it by itself. Needs the application of these tests."""
        return all(status == 200 for status, _, _ in every_web_process(self, "/ready").values())

    def wait_ready(self, seconds: float = PATIENCE_S) -> None:
        try:
            until(self.ready, "the service is ready", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-5000:]}") from None

    def wait_gone(self, seconds: float = PATIENCE_S) -> None:
        """No process of it lives."""
        try:
            until(lambda: not self.titles(), "every process has gone", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; left are {self.titles()}") from None

    def runtime(self) -> list[str]:
        """What is in the directory for runtime files."""
        return sorted(path.name for path in (self.directory / "run").iterdir())

    def assert_nothing_left(self, seconds: float = 5.0) -> None:
        """After an orderly end: no process, no runtime file, the port free."""
        self.wait_gone(seconds)
        assert self.runtime() == []
        assert binds(self.port)

    def post(self, path: str, body: bytes) -> Response:
        with self.connect() as client:
            return ask(client, path, body)

    def predict(self, model: str, **row: object) -> Response:
        return self.post(f"/predict/{model}", json.dumps(row).encode())


@contextlib.contextmanager
def service(
    models: Models | None = None,
    *flags: str,
    app: str = APP,
    web: int = 2,
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
    port: int = 0,
    ready: bool = True,
    arena: Mapping[str, object] | None = None,
    group: bool = False,
) -> Iterator[Stack]:
    """A running service. At the block's end it is stopped, if it still runs, and every process of it must go."""
    with contextlib.ExitStack() as ends, tempfile.TemporaryFile() as stderr:
        if directory is None:
            directory = ends.enter_context(place())
        environ = environment(directory, models, arena) | dict(env or {})
        process = start(app, *flags, workers=web, env=environ, cwd=directory, stderr=stderr, port=port, group=group)
        ends.callback(end_all, directory, process.wait)
        try:
            stack = Stack(process, listening_port(process, stderr), stderr, directory)
            if ready:
                stack.wait_ready()
                replicas = sum(int(str(table.get("replicas", 1))) for table in (models or {}).values())
                until(lambda: len(stack.compute()) >= replicas, "every replica has been started")
                if app == APP:
                    until(stack.all_ready, "every web process knows")
            yield stack
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE_S)
                stack.wait_gone()
        finally:
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """A directory for one service, or for several that follow each other. Short: socket paths have 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="hr-"))
    (directory / "run").mkdir()
    try:
        yield directory
    finally:
        end_all(directory)
        shutil.rmtree(directory)


def environment(directory: Path, models: Models | None, arena: Mapping[str, object] | None = None) -> dict[str, str]:
    """The environment of a service in `directory` with these models, the built-in default if none are given."""
    environ = {"HEADRACE_POOL_SOCKET": "", "HEADRACE_RUNTIME_DIR": str(directory / "run")}
    if models is not None:
        path = directory / "models.toml"
        path.write_text(toml(models, arena or {"slots": SMALL_ARENA}))
        environ["HEADRACE_CONFIG"] = str(path)
    return environ


def toml(models: Models, arena: Mapping[str, object]) -> str:
    lines = ["[arena]", *(f"{key} = {json.dumps(value)}" for key, value in arena.items())]
    for name, table in models.items():
        lines.append(f"[models.{name}]")
        for key, value in table.items():
            if isinstance(value, dict):
                inner = ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items())
                lines.append(f"{key} = {{{inner}}}")
            else:
                lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


# Processes


def titles(directory: Path) -> dict[int, str]:
    """Every process whose working directory this is, with its command line; zombies are not listed."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{entry}/cwd") == str(directory):
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
                found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
    return found


def end_all(directory: Path, reap: object = None) -> None:
    """Kill whatever still runs there: what a failed test has left."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := titles(directory)) and time.monotonic() < deadline:
        for pid in left:
            kill(pid)
        time.sleep(0.02)
    if callable(reap):
        reap()


def kill(pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def binds(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# Requests


def head(path: str, length: int, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *headers, "", ""]).encode()


def ask(client: Client, path: str, body: bytes | None = None, *headers: str) -> Response:
    """One request on an open connection, POST if there is a body. A connection that ends before the answer is
    `ConnectionError`, whichever way it ends."""
    if body is None:
        client.send("\r\n".join([f"GET {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode())
    else:
        client.send(head(path, len(body), *headers) + body)
    try:
        response = client.response()
    except AssertionError as error:
        raise ConnectionError(f"cut off: {error}") from None
    if response[0] == 0:
        raise ConnectionError("closed without an answer")
    return response


def code_of(response: Response) -> str:
    code = json.loads(response[2]).get("code", "")
    assert isinstance(code, str)
    return code


@contextlib.contextmanager
def threads(count: int, run: object) -> Iterator[threading.Event]:
    """`run(number, done)` in each of so many threads, until the block ends; then all have ended."""
    assert callable(run)
    done = threading.Event()
    running = [threading.Thread(target=run, args=(n, done)) for n in range(count)]
    for thread in running:
        thread.start()
    try:
        yield done
    finally:
        done.set()
        for thread in running:
            thread.join(PATIENCE_S * 2)
        assert not any(thread.is_alive() for thread in running)


def every_web_process(stack: Stack, path: str, seconds: float = PATIENCE_S) -> dict[int, Response]:
    """`path` asked of each web process; each answer names its process in `x-pid`."""
    answers: dict[int, Response] = {}
    deadline = time.monotonic() + seconds
    while set(answers) != set(stack.web()) and time.monotonic() < deadline:
        with stack.connect() as client:
            response = ask(client, path)
        answers[int(response[1]["x-pid"])] = response
    return answers

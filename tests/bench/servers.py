"""The servers that are measured, Headrace and its peers: how each is started, found, checked and ended.

Each has a directory of its own as its working directory. All its processes keep that, whoever their parent becomes,
so the directory tells whose CPU is counted, and what has to end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
BODY = b'{"features":[1,2,3,4]}'
CHECKS: tuple[tuple[bytes, list[float]], ...] = (
    (BODY, [5.25, 5.25]),
    (b'{"features": [0.5, -8, 1e3, 0]}', [496.5, 496.5]),
    (b'{"features":[0,0,0,0]}', [0.25, 0.25]),
)
GUNICORN = [sys.executable, "-m", "gunicorn"]
HEADRACE = [*GUNICORN, "-c", str(ROOT / "gunicorn.conf.py"), "-b", "127.0.0.1:{port}"]
# What Headrace's settings say too; the rest is gunicorn's own.
PLAIN = ["-k", "gevent", "-w", "1", "-b", "127.0.0.1:{port}", "--keep-alive", "75", "--no-control-socket"]
MOSEC = ["{mosec}/python", "-m", "tests.bench.peer_mosec", "--address", "127.0.0.1", "--port", "{port}"]
MOSEC += ["--log-level", "warning", "--timeout", "30000"]

COMMANDS: dict[str, list[str]] = {
    "headrace": HEADRACE,
    "headrace-access-log": [*HEADRACE, "--access-logfile", "access.log"],
    "headrace-routes": [*HEADRACE, "tests.bench.apps:server"],
    "headrace-streams": [*HEADRACE, "tests.bench.apps:server"],
    "flask": [*GUNICORN, *PLAIN, "tests.bench.peer_flask:app"],
    "flask-streams": [*GUNICORN, *PLAIN, "--worker-connections", "6500", "tests.bench.peer_flask:app"],
    "mosec": MOSEC,
    "mosec-batching": [*MOSEC, "--batch"],
}
# The pool's configuration where a server needs more than the packaged default.
CONFIGS: dict[str, str] = {
    "headrace-streams": """
[models.score]
model = "workers.models.dense:Dense"

[models.ticks]
model = "tests.bench.ticks:Ticks"
max_queue = 5000

[models.idle]
model = "tests.bench.ticks:Idle"
max_queue = 5000

[models.endless]
model = "tests.bench.ticks:Endless"
max_queue = 5000
""",
}


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "stderr"

    def cpu(self) -> dict[int, float]:
        """Seconds that each of its processes has computed so far."""
        return {pid: seconds for pid in processes(self.directory) if (seconds := cpu_of(pid)) is not None}

    def web(self) -> int | None:
        """Its one web process, where gunicorn runs it."""
        return next((pid for pid in processes(self.directory) if title(pid).startswith("gunicorn: worker")), None)

    def shorten_logs(self) -> None:
        """What it has logged is thrown away, as by whoever rotates logs. It appends, so it goes on at the start."""
        for name in ("stderr", "access.log"):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(self.directory / name, 0)

    def answers(self, path: str, body: bytes) -> object:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            return json.loads(answer) if response.status == 200 else f"{response.status} {answer[:200]!r}"
        finally:
            connection.close()

    def check(self, path: str) -> None:
        """It answers what every other one does; Headrace has a line for it in its log, as shipped."""
        for body, scores in CHECKS:
            answer = self.answers(path, body)
            if answer != {"scores": scores}:
                raise AssertionError(f"{self.name} answers {body!r} at {path} with {answer!r}, not with {scores}")
        if self.name.startswith("headrace"):
            line = f"POST {path} -> 200".encode()
            wait_until(lambda: line in self.log.read_bytes(), f"{self.name} has logged {line!r}", 5)


@contextlib.contextmanager
def running(name: str, mosec: Path | None = None) -> Iterator[Server]:
    """A server that answers; it has ended, with all its processes, when the block has."""
    directory = Path(tempfile.mkdtemp(prefix="hr-bench-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(name, port, directory)
    command = [part.format(port=port, mosec=mosec) for part in COMMANDS[name]]
    process: subprocess.Popen[bytes] | None = None
    try:
        with open(server.log, "ab") as stderr:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=_environ(directory, CONFIGS.get(name)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            wait_until(lambda: _ready(server, process), f"{name} answers", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{server.log.read_text(errors='replace')[-3000:]}") from None
        yield server
    finally:
        if process is not None:
            _end(process, directory)
        shutil.rmtree(directory, ignore_errors=True)


def _environ(directory: Path, config: str | None) -> dict[str, str]:
    configured = {}
    if config is not None:
        (directory / "headrace.toml").write_text(config)
        configured["HEADRACE_CONFIG"] = str(directory / "headrace.toml")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "GUNICORN_", "MOSEC_"))
    }
    inherited.pop("VIRTUAL_ENV", None)
    return {
        **inherited,
        **configured,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(directory),
        "HEADRACE_RUNTIME_DIR": str(directory),
        "HEADRACE_WEB_WORKERS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _ready(server: Server, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise AssertionError(f"{server.name} has ended, with status {process.returncode}")
    try:
        return isinstance(server.answers("/score", BODY), dict)
    except (OSError, http.client.HTTPException):
        return False


def _end(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Ask, then insist. Nobody else has a process there."""
    deadline = time.monotonic() + 10
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    while (left := processes(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)


def processes(directory: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/cwd") == str(directory):
                    found.append(int(entry))
    return found


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def cpu_of(pid: int) -> float | None:
    """User and system seconds."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """Seconds that the processors have spent on anything since the machine started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    idle, waiting = fields[3:5]
    return (sum(fields) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)

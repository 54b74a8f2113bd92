"""What a newcomer does: clone, type the README's first command, ask for a score, press Ctrl-C. Run by `.ci/run`.

The command is taken from the README as it stands, so it uses the network (to install) and the default address.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
INSTALL_S = 600.0
ADDRESS = "http://127.0.0.1:8080"


def first_command(readme: str) -> str:
    """The first block of the section "Start"."""
    block = re.search(r"^## Start$.*?^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert block is not None, "README.md has no command in its section 'Start'"
    return block[1].strip()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-clone-") as place:
        clone, run = Path(place, "clone"), Path(place, "run")
        run.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
        command = first_command((clone / "README.md").read_text())
        print(f"$ {command}", flush=True)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHON"))}
        environ["XDG_RUNTIME_DIR"] = str(run)
        # As from a shell in a terminal: a process group of its own, which a Ctrl-C then reaches as a whole.
        shell = subprocess.Popen(
            ["bash", "-c", command], cwd=clone, env=environ, stdout=subprocess.PIPE, process_group=0
        )
        try:
            check(shell, clone, run)
        finally:
            for pid in processes(clone):
                os.kill(pid, signal.SIGKILL)
            shell.wait()
            assert shell.stdout is not None
            shell.stdout.close()


def check(shell: subprocess.Popen[bytes], clone: Path, run: Path) -> None:
    assert shell.stdout is not None
    give_up = time.monotonic() + INSTALL_S
    os.set_blocking(shell.stdout.fileno(), False)
    said = b""
    while f"Listening on {ADDRESS}\n".encode() not in said:
        assert shell.poll() is None, f"it ended with {shell.returncode}: {said.decode()[-2000:]}"
        assert time.monotonic() < give_up, f"it does not listen: {said.decode()[-2000:]}"
        said += shell.stdout.read() or b""
        time.sleep(0.05)
    wait(lambda: ask("/ready", None)[0] == 200, "the service is ready")
    answer = ask("/score", b'{"features":[1,2,3,4]}')
    assert answer == (200, b'{"scores":[5.25,5.25]}'), answer
    os.killpg(shell.pid, signal.SIGINT)
    wait(lambda: shell.poll() is not None, "it ends")
    # bash passes the code of its last command on, or ends by the signal itself.
    assert shell.returncode in (0, 130, -signal.SIGINT), shell.returncode
    wait(lambda: not processes(clone), "every process has gone")
    assert list(run.iterdir()) == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 8080))
    print("a fresh clone serves, and ends with Ctrl-C")


def ask(path: str, body: bytes | None) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(ADDRESS + path, body, timeout=5) as response:
            return response.status, response.read()
    except OSError as error:  # `HTTPError` is one, too
        return getattr(error, "code", 0), b""


def wait(condition: object, what: str, seconds: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def processes(directory: Path) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd") == str(directory):
                Path(f"/proc/{entry}/cmdline").read_bytes()
                found.append(int(entry))
        except OSError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())

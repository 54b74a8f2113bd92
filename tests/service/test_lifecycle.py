"""Starting, ending and reloading real gunicorn: one clear line when it cannot start, nobody's request lost when it
ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.service.serving import PATIENCE_S, ROOT, Client, Served, children, gunicorn, start, stop, until

SLOW = b"GET /slow?s=%b HTTP/1.1\r\nHost: a\r\n\r\n"


def test_the_start_is_one_line_with_the_real_address() -> None:
    with gunicorn() as served:
        assert served.port > 0
        assert [line for line in served.log().splitlines() if "GET / -> 404" not in line] == []


def test_each_request_is_one_line_with_its_id() -> None:
    with gunicorn() as served:
        served.exchange(b"GET /pid?q=1 HTTP/1.1\r\nHost: a\r\nX-Request-ID: me.1\r\nConnection: close\r\n\r\n")
        until(lambda: "GET /pid -> 200 " in served.log(), "the log line")
        assert served.log().rstrip().endswith(" ms me.1")


def failed_start(*flags: str, app: str = "tests.service.apps:server", **env: str) -> tuple[int, list[str]]:
    process = start(app, *flags, env=env, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    return process.returncode, stderr.decode().splitlines()


def test_a_busy_port_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        expected = f"Error: cannot listen on 127.0.0.1:{port}: Address already in use"
        assert failed_start("-b", f"127.0.0.1:{port}") == (1, [expected])


def test_a_unix_socket_somebody_listens_on_is_not_taken_away(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(path)
        taken.listen()
        assert failed_start("-b", f"unix:{path}") == (1, [f"Error: unix:{path} is in use by another process"])


def test_an_unknown_or_ill_typed_setting_is_one_line_that_names_it() -> None:
    code, lines = failed_start(HEADRACE_BIDN="x")
    assert (code, len(lines), "HEADRACE_BIDN" in lines[0]) == (1, 1, True)
    code, lines = failed_start(HEADRACE_BODY_LIMIT="big")
    assert (code, lines) == (1, ["Error: HEADRACE_BODY_LIMIT must be a whole number, not 'big'"])


def test_check_config_starts_nothing_and_needs_no_free_port(tmp_path: Path) -> None:
    with gunicorn() as served:
        process = start(
            "tests.service.apps:server",
            "--check-config",
            port=served.port,
            env={"HEADRACE_POOL_SOCKET": "", "HEADRACE_RUNTIME_DIR": str(tmp_path)},
            stderr=subprocess.PIPE,
        )
        assert process.communicate(timeout=PATIENCE_S) == (b"", b"")
        assert (process.returncode, list(tmp_path.iterdir())) == (0, [])


def test_flags_of_gunicorn_win_over_our_settings() -> None:
    with gunicorn(
        "tests.service.apps:server", "--workers", "3", workers=3, env={"HEADRACE_WEB_WORKERS": "1"}
    ) as served:
        assert len(children(served.process.pid)) == 3


def test_the_master_loads_neither_flask_nor_the_application() -> None:
    code = (
        "import sys, service.gunicorn_conf, service.webworker\n"
        "print([name for name in ('flask', 'werkzeug', 'service.app', 'service.server', 'service.errors', 'numpy')"
        " if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_to_stop_finishes_what_was_accepted(sig: signal.Signals) -> None:
    with gunicorn() as served, served.connect() as busy, served.connect() as idle:
        assert idle.get("/pid")[0] == 200
        busy.send(SLOW % b"1.5")
        until(lambda: accepted(served) >= 2, "both connections are accepted")
        served.signal(sig)
        assert idle.rest() == b""  # closed, not reset, long before keep-alive ends
        status, headers, body = busy.response()
        assert (status, headers["connection"], body) == (200, "close", b"slow")
        assert served.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            Client(served.port)
        assert "Traceback" not in served.log()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_web_process_that_is_told_to_stop_finishes_too(sig: signal.Signals) -> None:
    with gunicorn(workers=1) as served, served.connect() as busy:
        (worker,) = children(served.process.pid)
        busy.send(SLOW % b"1.0")
        until(lambda: accepted(served) >= 1, "the connection is accepted")
        os.kill(worker, sig)
        assert busy.response()[::2] == (200, b"slow")
        until(lambda: worker not in children(served.process.pid), "the web process ends")
        assert b"pid" in served.get("/pid")


def test_a_second_interrupt_is_quick() -> None:
    with gunicorn() as served, served.connect() as busy:
        busy.send(SLOW % b"30")
        until(lambda: accepted(served) >= 1, "the connection is accepted")
        served.signal(signal.SIGINT)
        until(lambda: refused(served.port), "the drain has begun")
        started = time.monotonic()
        served.signal(signal.SIGINT)
        assert served.wait() == 0
        assert time.monotonic() - started < 3


def test_one_ctrl_c_of_a_terminal_is_one_signal_though_it_arrives_twice() -> None:
    with gunicorn() as served, served.connect() as busy:
        (worker,) = children(served.process.pid)
        busy.send(SLOW % b"1.0")
        until(lambda: accepted(served) >= 1, "the connection is accepted")
        os.kill(worker, signal.SIGINT)
        served.signal(signal.SIGINT)
        assert busy.response()[::2] == (200, b"slow")
        assert served.wait() == 0


def test_web_processes_finish_and_leave_when_their_master_is_killed() -> None:
    with gunicorn(workers=2) as served, served.connect() as busy:
        workers = children(served.process.pid)
        busy.send(SLOW % b"1.0")
        until(lambda: accepted(served) >= 1, "the connection is accepted")
        served.process.kill()
        assert busy.response()[::2] == (200, b"slow")
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the web processes leave", 5)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", served.port))


def test_a_signal_at_any_moment_of_a_start_ends_it() -> None:
    for delay in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5):
        with tempfile.TemporaryFile() as stderr:
            process = start("tests.service.apps:server", workers=2, stderr=stderr)
            try:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(delay)  # the moment is what varies: web processes are being forked, then load
                process.send_signal(signal.SIGTERM)
                assert process.wait(5) == 0
            finally:
                stop(process)


def test_a_request_over_the_graceful_timeout_is_cut(tmp_path: Path) -> None:
    with gunicorn(env={"HEADRACE_GRACEFUL_TIMEOUT": "1"}) as served, served.connect() as busy:
        busy.send(SLOW % b"30")
        until(lambda: accepted(served) >= 1, "the connection is accepted")
        started = time.monotonic()
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert time.monotonic() - started < 5


def test_max_requests_resets_nobody() -> None:
    with gunicorn("tests.service.apps:server", "--max-requests", "40", workers=2) as served, load(served, 6) as answers:
        until(lambda: len(answers.pids) >= 6, "several web processes have come and gone", 60)
    assert answers.failures == []


def test_hup_under_load_fails_no_request_and_loads_new_code(tmp_path: Path) -> None:
    write_app(tmp_path, "one")
    with gunicorn("probe:server", workers=2, cwd=tmp_path) as served:
        with load(served, 6) as answers:
            for name in ("two", "three"):
                before = set(answers.pids)
                write_app(tmp_path, name)
                served.signal(signal.SIGHUP)
                until(lambda name=name: served.get("/name") == name.encode(), f"{name} serves", 60)  # type: ignore[misc]
                until(lambda before=before: bool(set(answers.pids) - before), "new web processes serve")  # type: ignore[misc]
                until(lambda: len(children(served.process.pid)) == 2, "the old web processes have left")
        assert answers.failures == []
        assert "Traceback" not in served.log()


@pytest.mark.parametrize("broken", ["application", "configuration"])
def test_a_hup_that_cannot_work_leaves_the_old_service_running(tmp_path: Path, broken: str) -> None:
    write_app(tmp_path, "old")
    conf = tmp_path / "conf.py"
    conf.write_text("from service.gunicorn_conf import *\n")
    with gunicorn("probe:server", "-c", str(conf), cwd=tmp_path) as served:
        workers = children(served.process.pid)
        if broken == "application":
            (tmp_path / "probe.py").write_text("import no_such_module_of_ours\n")
        else:
            conf.write_text("workers = 'many'\n")
        served.signal(signal.SIGHUP)
        until(lambda: "Reload refused" in served.log(), "the refusal", 60)
        (line,) = (line for line in served.log().splitlines() if "Reload refused" in line)
        assert ("no_such_module_of_ours" if broken == "application" else "many") in line
        assert served.get("/name") == b"old"
        assert children(served.process.pid) == workers
        conf.write_text("from service.gunicorn_conf import *\n")
        write_app(tmp_path, "new")
        served.signal(signal.SIGHUP)
        until(lambda: served.get("/name") == b"new", "the next HUP works", 60)


def test_hup_loads_new_code_of_the_service_itself(tmp_path: Path) -> None:
    write_app(tmp_path, "any")
    for package in ("service", "workers"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with gunicorn("probe:server", cwd=tmp_path) as served:
        errors = tmp_path / "service" / "errors.py"
        assert served.get("/nope") == b'{"error":"not found"}'
        errors.write_text(errors.read_text().replace('{"error": reason}', '{"fault": reason}'))
        conf = tmp_path / "service" / "gunicorn_conf.py"
        conf.write_text(conf.read_text() + "\nworkers = 2\n")
        served.signal(signal.SIGHUP)
        until(lambda: served.get("/nope") == b'{"fault":"not found"}', "the new code answers", 60)
        until(lambda: len(children(served.process.pid)) == 2, "the new configuration holds")


def test_term_during_a_reload_is_not_kept_waiting(tmp_path: Path) -> None:
    write_app(tmp_path, "old")
    with gunicorn("probe:server", cwd=tmp_path) as served:
        (tmp_path / "probe.py").write_text("import time\ntime.sleep(30)\n")
        served.signal(signal.SIGHUP)
        until(lambda: len(children(served.process.pid)) == 2, "the check runs")
        started = time.monotonic()
        served.signal(signal.SIGTERM)
        assert served.wait() == 0
        assert time.monotonic() - started < 5


def test_term_while_old_web_processes_finish_their_requests_is_not_kept_waiting(tmp_path: Path) -> None:
    write_app(tmp_path, "old")
    with gunicorn("probe:server", cwd=tmp_path) as served, served.connect() as busy:
        busy.send(SLOW % b"4")
        until(lambda: accepted(served) >= 1, "the connection is accepted")
        write_app(tmp_path, "new")
        served.signal(signal.SIGHUP)
        until(lambda: served.get("/name") == b"new", "the new code serves while the old finishes")
        served.signal(signal.SIGTERM)
        until(lambda: refused(served.port), "the stop has begun", 1.5)
        assert busy.response()[::2] == (200, b"slow")
        assert served.wait() == 0


# Helpers


def write_app(directory: Path, name: str) -> None:
    (directory / "probe.py").write_text(
        f"from tests.service.apps import server\nserver.get('/name', lambda request: {name!r})\n"
    )


def accepted(served: Served) -> int:
    """Connections to the server that a web process has taken from the queue."""
    inodes = set()
    for worker in children(served.process.pid):
        for fd in Path(f"/proc/{worker}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd))
            except OSError:
                continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        row[1].endswith(f":{served.port:04X}") and row[3] == "01" and f"socket:[{row[9]}]" in inodes for row in rows
    )


def refused(port: int) -> bool:
    try:
        Client(port).socket.close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:  # the listening socket was closed in this very instant
        return False
    return False


class Answers:
    def __init__(self) -> None:
        self.pids: set[bytes] = set()
        self.failures: list[str] = []


@contextmanager
def load(served: Served, clients: int) -> Iterator[Answers]:
    """Clients in a closed loop, half on kept connections, half on a new one for each request."""
    answers, done = Answers(), threading.Event()

    def run(keep: bool) -> None:
        client = served.connect()
        try:
            while not done.is_set():
                status, headers, body = client.get("/pid")
                if status == 200:
                    answers.pids.add(body)
                else:
                    answers.failures.append(f"status {status}")
                if not keep or headers.get("connection") == "close":
                    client.socket.close()
                    client = served.connect()
        except Exception as error:
            answers.failures.append(repr(error))
        finally:
            client.socket.close()

    threads = [threading.Thread(target=run, args=(n % 2 == 0,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        done.set()
        for thread in threads:
            thread.join(PATIENCE_S)

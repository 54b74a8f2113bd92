"""gunicorn's settings for Headrace, and what its master does around them.

`gunicorn -c gunicorn.conf.py` reads this, or `-c python:service.gunicorn_conf` where there is no checkout. Every
setting of gunicorn can still be given on its command line or in a configuration file that imports this one.
The master loads this module: nothing here may import the application.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any


def _end_start(number: int, frame: object) -> None:
    """What a start has made is removed, then the signal does what it does by default."""
    if "service.master" in sys.modules:
        sys.modules["service.master"].clean_up()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# From here on a signal ends a start at once. Ctrl-C as Python's own KeyboardInterrupt could fall into an import of a
# library that swallows whatever is raised there, and be lost. Once it runs, gunicorn has handlers of its own.
for _number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(_number, _end_start)

from service import master  # noqa: E402
from service.config import ConfigError, Settings  # noqa: E402
from service.open_streams import streams  # noqa: E402

try:
    _settings = Settings.from_env(os.environ)
except ConfigError as error:
    print(f"Error: {error}", file=sys.stderr)
    raise SystemExit(1) from None

wsgi_app = "service:create_app()"
worker_class = "service.webworker.HeadraceWorker"
bind = _settings.bind
workers = _settings.web_workers
worker_connections = 6500  # so that 5,000 streams leave room for everything else
keepalive = 75
timeout = 30
graceful_timeout = _settings.graceful_timeout
limit_request_line = 8190
limit_request_fields = 100
limit_request_field_size = 8190
forwarder_headers = ""  # no header may change the path
loglevel = "warning"  # the start is one line, and each request has its own
control_socket_disable = True  # its default path is one per user, not one per instance
# The heartbeats of the web processes must not wait for a disk.
worker_tmp_dir = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def on_starting(arbiter: Any) -> None:
    master.prepare(arbiter)


def when_ready(arbiter: Any) -> None:
    master.announce(arbiter)


def on_exit(arbiter: Any) -> None:
    master.clean_up()


def post_fork(arbiter: Any, worker: Any) -> None:
    from service import log  # not before: the master must not load what it leads to

    log.start()


def post_worker_init(worker: Any) -> None:
    streams.allow(_connections(worker))
    if "service.connect" in sys.modules:
        from service.connect import open_clients

        open_clients()
    # What is loaded by now stays; no request shall wait while the collector looks through all of it.
    gc.collect()
    gc.freeze()


def _connections(worker: Any) -> int:
    """How many a web process answers at once."""
    if worker.cfg.worker_class_str == "gthread":
        return int(worker.cfg.threads)
    return 1 if worker.cfg.worker_class_str == "sync" else int(worker.cfg.worker_connections)


def worker_exit(arbiter: Any, worker: Any) -> None:
    if worker.pid == os.getpid() and "service.connect" in sys.modules:
        from service.connect import close_clients

        close_clients()

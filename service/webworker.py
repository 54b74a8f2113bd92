"""The gunicorn worker class: gunicorn's gevent worker, lean for plain requests, with deadlines, JSON errors and an
end that loses nobody.

What differs from the base class:
- a plain request (`service.plain`) is read by a parser in C and answered in one send; every other one, its bytes put
  back, goes gunicorn's own way, and both ways give the same answer;
- every wait for a client has a deadline: the head of a request, its body, the reading of the answer;
- an error gunicorn itself answers is JSON, and costs the log one line when it is the client's;
- SIGTERM, SIGINT, SIGQUIT, `max_requests` and a lost master all end alike: no new connections, answers to all
  requests that have arrived, `Connection: close` on each, exit once nothing is in flight.

The gunicorn master loads this module, so it imports nothing of the application.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import gevent
from gevent.pool import Pool
from gevent.socket import socket as GeventSocket
from gunicorn import sock as gunicorn_sock
from gunicorn.glogging import Logger
from gunicorn.http import errors as http_errors
from gunicorn.http import get_parser, wsgi
from gunicorn.http2 import negotiation
from gunicorn.instrument.statsd import Statsd
from gunicorn.workers.ggevent import GeventWorker

from service import direct
from service.access_log import AccessLog
from service.answer import Answer
from service.config import Settings
from service.connection import LOOK_S, TURN_S, ClientGone, Doorbell, Reader, SlowHead, linger, refuse
from service.descriptors import make_room
from service.environ import VIEWS_KEY, WATCH_KEY
from service.lean import Errors, Lean, may_be_lean
from service.listening import Listener, Server, shake_hands
from service.open_streams import streams
from service.outbox import Outbox
from service.plain import HeadReader, PlainRequest

_POLL_S = 0.05  # between two looks at whether to end, or at what is left to do before the end
_NOTIFY_S = 1.0
_LOOKED_AT_ONCE = 50
_KILL_S = 0.3
_END_STREAMS_S = 2.0  # streams have so much less than other requests: their ends have to be sent
_FINISH_BODY_S = 1.0  # for the small rest of a body that the application has not read

# While draining: how long a connection may have been silent before it is closed. Its client may be about to
# send, and then would see a reset: a busy client sends within the grace, is answered, and told to close.
_GRACE_S = 0.5
_GRACE_OF_NEW_S = 1.0

_CLIENT_LEFT = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT})

# What is wrong with a request that gunicorn's parser refuses; the first class that fits, 400 when none does.
_REFUSALS: tuple[tuple[type[Exception], int, str], ...] = (
    (http_errors.InvalidResponseHeader, 500, "internal error"),  # subclasses of two below, but the application's fault
    (http_errors.InvalidResponseHeaderName, 500, "internal error"),
    (http_errors.ConfigurationProblem, 500, "internal error"),
    (http_errors.LimitRequestLine, 414, "request line too long"),
    (http_errors.LimitRequestHeaders, 431, "request headers too large"),
    (http_errors.ExpectationFailed, 417, "expectation failed"),
    (http_errors.UnsupportedTransferCoding, 501, "unsupported transfer coding"),
    (http_errors.ForbiddenProxyRequest, 403, "forbidden"),
    (http_errors.InvalidRequestLine, 400, "malformed request line"),
    (http_errors.InvalidRequestMethod, 400, "malformed method"),
    (http_errors.InvalidHTTPVersion, 400, "unsupported HTTP version"),
    (http_errors.ParseException, 400, "malformed request"),
)

logger = logging.getLogger("headrace")


class ApplicationFailed(Exception):
    """What the application raised, whatever its kind: not the client's fault, though it may be an `OSError`."""


class HeadraceWorker(GeventWorker):  # type: ignore[misc]
    alive: bool
    worker_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # gunicorn's own, whatever they are
        super().__init__(*args, **kwargs)
        self._readers: set[Reader] = set()
        self._doorbells: set[Doorbell] = set()
        self._looked = 0.0
        self._signals: list[int] = []
        self._quick = False
        self._notified = 0.0

    def run(self) -> None:
        self._settings = Settings.from_env(os.environ)
        self._tls = gunicorn_sock.ssl_context(self.cfg) if self.cfg.is_ssl else None
        self._heads = HeadReader(self.cfg) if may_be_lean(self.cfg, self.log) else None
        self._environ = {
            **wsgi.base_environ(self.cfg),
            "wsgi.errors": Errors(self.cfg),
            "wsgi.multithread": True,
        }
        self._keepalive = self.cfg.keepalive
        self.worker_connections = make_room(self.worker_connections)
        streams.allow(self.worker_connections)
        self._accounts = type(self.log).access is not Logger.access  # statsd, or the user's own
        self.outbox = Outbox(gevent.get_hub().loop.run_callback)
        self._access = AccessLog(self.log, gevent.get_hub().loop.run_callback)
        servers = [self._listen(sock) for sock in self.sockets]
        try:
            while self.alive:
                self.notify()
                self._look_for_silent()
                gevent.sleep(_POLL_S)
            self._drain(servers)
        finally:
            self._access.flush()

    # One connection

    def handle(self, listener: Listener, client: Any, addr: Any) -> None:
        if self._tls is not None:
            client = shake_hands(self._tls, client, self._settings.header_timeout)
            if client is None:
                return
        if self._is_not_plain_http(client, addr):
            super().handle(listener, client, addr)
            return
        unread = True  # whether bytes may be left that the client has sent
        heads = self._heads if type(client) is GeventSocket else None
        doorbell = Doorbell(client) if heads else None
        reader = Reader(client, self._settings, self._keepalive, doorbell)
        self._readers.add(reader)
        if doorbell is not None:
            self._doorbells.add(doorbell)
        req: Any = None
        try:
            lean = Lean(heads, reader, self._environ, self.cfg, listener.getsockname(), addr) if heads else None
            parser = get_parser(self.cfg, client, addr)
            parser.unreader = reader
            proxy_info: dict[str, Any] = {}
            while True:
                req = None
                plain = lean.next() if lean else None
                if plain:
                    req, environ = plain
                    keep = self._serve_plain(reader, req, environ, client)
                    parser.mesg = req if req.body else None  # what is to be read to its end
                else:
                    reader.begin_head()
                    req = next(parser)
                    req.proxy_protocol_info = proxy_info = req.proxy_protocol_info or proxy_info
                    keep = self._serve(reader, listener.getsockname(), req, client, addr)
                owing = doorbell.owing if doorbell is not None else None
                if owing is not None and (not keep or not plain or parser.mesg is not None or reader.has_more):
                    owing.settle()  # what comes next does not begin by waiting for a head, which would
                if not keep or not (parser.mesg is None or _finish_body(parser, reader)):
                    break
                if not plain or reader.has_more:
                    gevent.sleep(TURN_S)  # a client that is never waited for must not keep the others waiting
            # A client that was told it might go on may be about to.
            unread = (owing is not None and not keep) or reader.has_unread(req.body)
        except (StopIteration, http_errors.NoMoreData, ssl.SSLError, ClientGone, gevent.GreenletExit):
            unread = False  # the client has closed, or is not worth more words
        except SlowHead:
            self._refuse(client, addr, 408, "the request came too slowly")
        except OSError as error:
            unread = False
            if not isinstance(error, TimeoutError) and error.errno not in _CLIENT_LEFT:
                logger.exception("connection of %s failed", _name(addr))
        except Exception as error:  # the one place above the application
            self.handle_error(req, client, addr, error)
        finally:
            self._readers.discard(reader)
            if doorbell is not None:
                self.outbox.flush()
                doorbell.owing = None
                self._doorbells.discard(doorbell)
                doorbell.close()
            self._access.flush()  # who sees the connection close may look for the line
            if unread and not self._quick:
                linger(client)
            client.close()

    def _serve_plain(self, reader: Reader, req: PlainRequest, environ: dict[str, Any], sock: Any) -> bool:
        """As `_serve`, with less to do."""
        started = time.monotonic_ns() if self._accounts or self.log.access_log_enabled else None
        answer = Answer(req, sock, self.cfg, self, reader, self._settings.send_timeout)
        answer.environ = environ
        try:
            req.body = reader.begin_plain_body(environ, req.length)
            environ["wsgi.early_hints"] = answer.early_hints
            environ[VIEWS_KEY] = answer.start_response
            return self._run(answer, environ, req, started)
        except (ClientGone, gevent.GreenletExit):
            raise
        except BaseException as error:
            return self._broke_off(reader, req, answer, error)
        finally:
            answer.environ = {}  # which leads back here

    def _serve(self, reader: Reader, listener_name: Any, req: Any, sock: Any, addr: Any) -> bool:
        """Answer one request; whether the connection may carry another. Raises only what has not been answered."""
        started = time.monotonic_ns()
        environ: dict[str, Any] = {}
        answer: Answer | None = None
        try:
            self.cfg.pre_request(self, req)
            reader.begin_body(expects_continue=req._expected_100_continue)
            req._expected_100_continue = False  # or `create` would send it at once
            response_args = (self, reader, self._settings.send_timeout)
            answer, environ = wsgi.create(
                req, sock, addr, listener_name, self.cfg, response_class=Answer, response_args=response_args
            )
            answer.environ = environ
            environ["wsgi.multithread"] = True
            environ[WATCH_KEY] = reader.watch
            environ["wsgi.early_hints"] = answer.early_hints
            environ[VIEWS_KEY] = answer.start_response
            return self._run(answer, environ, req, started)
        except (ClientGone, gevent.GreenletExit):
            raise
        except BaseException as error:
            return self._broke_off(reader, req, answer, error)
        finally:
            self._after(req, environ, answer)
            if answer is not None:
                answer.environ = {}  # which leads back here

    def _run(self, answer: Answer, environ: dict[str, Any], req: Any, started: int | None) -> bool:
        """Call the application and account for its answer; whether the connection may carry another. `started`: None
        where nobody asks."""
        self._count()
        if not self._keepalive:
            answer.force_close()
        try:
            self._respond(answer, environ)
        finally:
            if started and answer.headers_sent:
                self._access.add(answer, req, environ, (time.monotonic_ns() - started) // 1000)
        return not answer.should_close()

    def _broke_off(self, reader: Reader, req: Any, answer: Answer | None, error: BaseException) -> bool:
        """What the application raised: `sys.exit`, or a timeout of gevent's, is its bug like any other."""
        if answer is not None and answer.headers_sent:
            logger.error("an answer to %s %s broke off", req.method, req.path, exc_info=error)
            self._count_log("exception")
            return False  # without the end of its body, so that the client knows
        if error is reader.failure or isinstance(error, (http_errors.ParseException, http_errors.NoMoreData)):
            raise error  # met while reading the body
        raise ApplicationFailed from error

    def _respond(self, answer: Answer, environ: dict[str, Any]) -> None:
        pieces = self.wsgi(environ, answer.start_response)
        unwatch: Callable[[], None] | None = None
        try:
            stream = getattr(pieces, "event_stream", None)
            if stream is not None:
                direct.send(answer, stream, pieces)
            elif isinstance(pieces, environ["wsgi.file_wrapper"]):
                answer.write_file(pieces)
            else:
                left = getattr(pieces, "client_left", None)
                if left is not None and answer.reader.watch is not None:
                    unwatch = answer.reader.watch(left)
                for piece in pieces:
                    answer.write(piece)
            answer.close()
        finally:
            if unwatch is not None:
                unwatch()
            if hasattr(pieces, "close"):
                pieces.close()

    def _after(self, req: Any, environ: dict[str, Any], answer: Answer | None) -> None:
        try:
            self.cfg.post_request(self, req, environ, answer)
        except Exception:
            logger.exception("post_request failed")

    def _count(self) -> None:
        self.nr += 1
        if self.nr >= self.max_requests and self.alive:
            self.log.info("Autorestarting worker after current request.")
            self.alive = False

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer a failure that never reached the application, or that it did not answer, in JSON."""
        refusals = ((status, reason) for kind, status, reason in _REFUSALS if isinstance(exc, kind))
        status, reason = next(refusals, (500, "internal error"))
        if status == 500:
            logger.error("connection of %s failed", _name(addr), exc_info=exc.__cause__ or exc)
        failed = exc.req if req is None and isinstance(exc, http_errors.InvalidHeader) else req
        self._count_log("exception" if status == 500 else "warning")
        if failed is not None:
            self._log_access_of_failed(failed, client, addr, status)
        self._refuse(client, addr, status, reason, str(exc), to_head=getattr(req, "method", None) == "HEAD")

    def _count_log(self, level: str) -> None:
        """gunicorn counts what its own log is told, and these lines go elsewhere."""
        if isinstance(self.log, Statsd):
            self.log.increment(f"gunicorn.log.{level}", 1)

    def _log_access_of_failed(self, req: Any, client: Any, addr: Any, status: int) -> None:
        """As gunicorn does, with as much of an environ."""
        environ = wsgi.default_environ(req, client, self.cfg)
        host, port = addr[:2] if isinstance(addr, tuple) else ("", -1)
        environ.update(REMOTE_ADDR=host, REMOTE_PORT=str(port))
        answer = wsgi.Response(req, client, self.cfg)
        answer.status = f"{status} {HTTPStatus(status).phrase}"
        self._access.add(answer, req, environ, 0)

    def _refuse(
        self, client: Any, addr: Any, status: int, reason: str, detail: str = "", *, to_head: bool = False
    ) -> None:
        logging.getLogger("headrace.request").info("%s -> %d %s %s", _name(addr), status, reason, detail[:200])
        refuse(client, status, reason, to_head)

    def _is_not_plain_http(self, client: Any, addr: Any) -> bool:
        """uwsgi and HTTP/2 in all its ways of beginning are left to gunicorn."""
        return bool(
            self.cfg.protocol != "http"
            or gunicorn_sock.is_http2_negotiated(client)
            or negotiation.prior_knowledge_allowed(self.cfg, addr)
            or negotiation.upgrade_allowed(self.cfg, addr)
        )

    # Beginning and end

    def _listen(self, sock: Any) -> Server:
        sock.setblocking(1)
        handle = partial(self.handle, Listener(sock.getsockname()))
        server = Server(sock, handle=handle, spawn=Pool(self.worker_connections))
        if self.cfg.workers > 1:
            server.max_accept = 1  # take turns with the other web processes
        server.start()
        return server

    def _drain(self, servers: list[Server]) -> None:
        """Answer everything that has arrived, then leave."""
        for server in servers:
            server.accept_rest()
            server.close()
        # A little less than the master's own limit, which is SIGKILL.
        grace, now = self.cfg.graceful_timeout, time.monotonic()
        until = now + grace - min(1.0, grace / 10)
        end_streams = now + max(grace - _END_STREAMS_S, grace / 2)
        while any(len(server.pool) for server in servers):
            if time.monotonic() > end_streams or self._quick:
                streams.end()
            if self._quick or time.monotonic() > until:
                break
            self._close_idle()
            self._look_for_silent()
            self.notify()
            gevent.sleep(_POLL_S)
        else:
            return
        if not self._quick:
            self.log.warning("Worker graceful timeout (pid:%s)", self.pid)
        for server in servers:
            server.stop(timeout=_KILL_S)

    def _look_for_silent(self) -> None:
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            due = [doorbell for doorbell in self._doorbells if doorbell.look_at <= now]
            for number, doorbell in enumerate(due, 1):
                doorbell.look(now)
                if number % _LOOKED_AT_ONCE == 0:
                    gevent.sleep(TURN_S)  # thousands of streams may have nothing to say, and each is to say so

    def _close_idle(self) -> None:
        now = time.monotonic()
        for reader in list(self._readers):
            if reader.idle and now - reader.idle_since >= (_GRACE_S if reader.requests else _GRACE_OF_NEW_S):
                reader.hang_up()

    def notify(self) -> None:
        now = time.monotonic()
        if now - self._notified >= _NOTIFY_S:
            self._notified = now
            self.tmp.notify()
        if self.ppid != os.getppid() and self.alive:
            self.log.info("Parent changed, shutting down: %s", self)
            self.alive = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals.append(sig)
        self._end()

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGQUIT: as SIGTERM, and at once when that has been asked for before.

        One Ctrl-C of a terminal reaches a web process twice, as its own SIGINT and as the master's SIGTERM; so a
        SIGINT means haste only after a SIGINT. A SIGQUIT after anything does: it is how the master hurries.
        """
        self._quick = signal.SIGINT in self._signals if sig == signal.SIGINT else bool(self._signals)
        self._signals.append(sig)
        gevent.spawn(self.cfg.worker_int, self)
        self._end()

    def _end(self) -> None:
        self.alive = False
        if not self.booted:
            sys.exit(0)  # still loading the application: there is nothing to finish


def _finish_body(parser: Any, reader: Reader) -> bool:
    """Read what the application has left of a body; whether a next request can follow. The request is answered, so
    whatever is wrong here gets no words."""
    until = time.monotonic() + _FINISH_BODY_S
    reader.begin_rest(until)
    try:
        return bool(parser.finish_body(deadline=until))
    except (http_errors.ParseException, OSError):
        return False


def _name(addr: Any) -> str:
    return f"{addr[0]}:{addr[1]}" if isinstance(addr, tuple) else "a client"

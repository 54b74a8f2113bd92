from __future__ import annotations

import fcntl
import logging
import os

from workers.log import UnblockingHandler


def test_a_pipe_nobody_reads_drops_lines_and_tells_how_many() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    try:
        handler = UnblockingHandler(writer)
        handler.setFormatter(logging.Formatter("%(message)s"))

        def say(text: str) -> None:
            handler.handle(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))

        say("first")
        say("lost")
        say("lost")
        assert os.read(reader, 4096) == b"first\n"
        say("after")
        assert os.read(reader, 4096) == b"2 log lines dropped\nafter\n"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_closed_reader_costs_no_request() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        UnblockingHandler(writer).handle(logging.LogRecord("x", logging.INFO, "", 0, "text", None, None))
    finally:
        os.close(writer)

"""Streams in curl, as everybody tries them first."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
from collections.abc import Iterator

import pytest

from service.sse import TOKENS
from tests.e2e.playing import END, WAYS, Playhouse, fail
from tests.programs import program
from tests.service.serving import PATIENCE_S


class Curl:
    """`curl -N`: what it has printed so far is `said`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said = b""

    def until(self, text: bytes) -> bytes:
        while text not in self.said:
            assert self._read(), self.said
        return self.said

    def finish(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bytes:
        stdout = self.process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], PATIENCE_S)[0], f"nothing more: {self.said!r}"
        piece: bytes = stdout.read1(65536)  # type: ignore[attr-defined]  # it is buffered
        self.said += piece
        return piece


@contextlib.contextmanager
def curl(address: str, *flags: str) -> Iterator[Curl]:
    command = [program("curl"), "-q", "-sSN", "--noproxy", "*", *flags, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield Curl(process)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
@pytest.mark.parametrize("way", WAYS)
def test_each_piece_is_printed_before_the_next_is_made(house: Playhouse, way: str, version: str) -> None:
    script = house.script()
    before = house.told()[1]
    with curl(house.address(script.at(way)), version) as client:
        for number in range(1, 6):
            script.add(f"piece {number} ")
            assert client.until(b"data: piece %d \n\n" % number).count(b"data:") == number
            assert house.told()[1] - before == number
        script.add(END)
        assert client.finish() == 0
        assert client.said == b"".join(TOKENS.frame(f"piece {number} ") for number in range(1, 6))
    house.until_free()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_ending_curl_frees_the_slot(house: Playhouse, way: str, sig: signal.Signals) -> None:
    script = house.script("a")
    with curl(house.address(script.at(way))) as client:
        client.until(TOKENS.frame("a"))
        house.until_live()
        client.process.send_signal(sig)
        house.until_free()


@pytest.mark.parametrize("way", WAYS)
def test_curl_sees_the_end_of_a_stream_that_fails_later(house: Playhouse, way: str) -> None:
    script = house.script("a", fail("out of tensors"))
    with curl(house.address(script.at(way))) as client:
        assert client.finish() == 0
        failure = b'event: error\ndata: {"error":"out of tensors","code":"MODEL_FAILED"}\n\n'
        assert client.said == TOKENS.frame("a") + failure


@pytest.mark.parametrize("way", WAYS)
def test_curl_tells_a_stream_that_fails_at_once_by_its_status(house: Playhouse, way: str) -> None:
    script = house.script(fail("out of tensors"))
    with curl(house.address(script.at(way)), "--fail-with-body", "-w", "%{http_code}") as client:
        assert client.finish() == 22
        assert client.said == b'{"error":"out of tensors","code":"MODEL_FAILED"}500'

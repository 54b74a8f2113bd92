"""One entry of the corpus, and the short forms it is written in. Text stands for the bytes of latin-1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

OURS = "ours"  # `apps.express` and `apps.by_flask`
PLAIN = "plain"
BOTH = (OURS, PLAIN)


@dataclass(frozen=True, slots=True)
class Entry:
    """`parts` are sent one by one, each after an answer to the one before. `answers` are expected before the server
    is asked whether the connection is still open; `half_close` is for requests after which the server waits for
    more, and for those where nobody knows."""

    name: str
    parts: tuple[bytes, ...]
    answers: int = 1
    half_close: bool = False
    apps: tuple[str, ...] = BOTH

    @property
    def bytes(self) -> bytes:
        return b"".join(self.parts)

    @property
    def bodiless(self) -> tuple[int, ...]:
        """Which answer is to HEAD; no entry has more than one, and that one first."""
        return (0,) if self.parts[0].lstrip().startswith(b"HEAD ") else ()


@dataclass(slots=True)
class Subject:
    apps: tuple[str, ...] = BOTH
    entries: list[Entry] = field(default_factory=list)

    def add(self, name: str, *parts: str | bytes, answers: int = 1, half_close: bool = False) -> None:
        raw = tuple(raw_bytes(part) for part in parts)
        self.entries.append(Entry(name, raw, answers, half_close, self.apps))


def raw_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")


def head(line: str, *headers: str, host: str | None = "Host: a") -> bytes:
    lines = [line, *([host] if host else []), *headers, "", ""]
    return raw_bytes("\r\n".join(lines))


def get(target: str = "/environ", *headers: str, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return head(f"{method} {target} {version}", *headers)


def post(target: str = "/echo", *headers: str, body: str | bytes = "", method: str = "POST") -> bytes:
    """With the length of the body, whatever `headers` say."""
    content = raw_bytes(body)
    return head(f"{method} {target} HTTP/1.1", f"Content-Length: {len(content)}", *headers) + content


def sent(target: str, *headers: str, body: str | bytes = "", method: str = "POST") -> bytes:
    """With no length but what `headers` say."""
    return head(f"{method} {target} HTTP/1.1", *headers) + raw_bytes(body)


def chunked(body: str | bytes, *headers: str, target: str = "/echo") -> bytes:
    return sent(target, "Transfer-Encoding: chunked", *headers, body=body)


def chunks(*pieces: str | bytes) -> bytes:
    raw: Iterable[bytes] = [raw_bytes(piece) for piece in pieces]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in raw) + b"0\r\n\r\n"

"""Small models that stream. Each is asked how much it is to say, and how to go wrong; zeros ask for nothing.

What it says carries the caller's nonce and the number of the piece, so that a caller can tell its own stream, and
that nothing of it is missing.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workers.errors import Refused
from workers.model import Array, Last, Piece, TensorSpec

ENDLESS = 1 << 40
RAISE, REFUSE, NO_PIECE, BAD_TEXT, DIE, HANG, HOLD, LEAVE, RAISE_ALL, TOO_FEW = range(1, 11)
"""What can go wrong at a piece; the last two by steps only. HOLD: no other thread runs for 2 s."""

INPUTS = (
    TensorSpec("nonce", "int64"),
    TensorSpec("pieces", "int64"),
    TensorSpec("size", "int64"),
    TensorSpec("wrong", "int64"),
    TensorSpec("at", "int64"),
    TensorSpec("gate", "int64"),
)


def ask(nonce: int, pieces: int, *, size: int = 0, wrong: int = 0, at: int = 0, gate: int = 0) -> dict[str, Array]:
    """Inputs for so many pieces of at least `size` bytes; `wrong` at piece `at`; from piece `gate` on, if that is not
    0, it waits until the file of the model's option exists."""
    values = {"nonce": nonce, "pieces": pieces, "size": size, "wrong": wrong, "at": at, "gate": gate}
    return {name: np.array([value], np.int64) for name, value in values.items()}


def piece(nonce: int, number: int, size: int = 0) -> bytes:
    """What is said: `bytes` or `str` in turns, and some of it not ASCII."""
    return f"{nonce}:{number}:é".encode().ljust(size, b".")


class Wish:
    def __init__(self, request: Mapping[str, Array]) -> None:
        assert all(array.shape == () and not array.flags.writeable for array in request.values())
        self.request = request
        self.number = 0

    def __getattr__(self, name: str) -> int:
        # Read when it is needed, however late: the inputs are there until the stream has ended.
        return int(self.request[name])

    def next(self) -> Piece:
        if self.wrong and self.number == self.at:
            go_wrong(self.wrong)
        said: Piece = piece(self.nonce, self.number, self.size)
        if self.number % 2:
            said = said.decode()
        self.number += 1
        return said


def go_wrong(wrong: int) -> None:
    if wrong == RAISE:
        raise ValueError("lost the thread")
    if wrong == REFUSE:
        raise Refused("not this one", code="NOT_THIS_ONE")
    if wrong == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == HOLD:
        ctypes.PyDLL(None).sleep(2)
    if wrong == LEAVE:
        raise asyncio.CancelledError("let go")
    while wrong == HANG:
        time.sleep(1)


class Diary:
    """Notes in the file `diary`, if there is one; `gate`: the file that opens it; `ms`: how long a piece, or a step,
    takes; `start_ms`: how long a start."""

    inputs: Sequence[TensorSpec] = INPUTS
    outputs: Sequence[TensorSpec] = ()

    def __init__(self, diary: str = "", gate: str = "", ms: float = 0.0, start_ms: float = 0.0) -> None:
        self.start_ms = start_ms
        self.diary = diary
        self.gate = Path(gate)
        self.ms = ms

    def load(self) -> None: ...

    def note(self, *words: object) -> None:
        if self.diary:
            with open(self.diary, "a") as file:
                file.write(" ".join(map(str, words)) + "\n")

    def shut(self, wish: Wish) -> bool:
        return bool(wish.gate) and wish.number + 1 >= wish.gate and not self.gate.exists()


class Talk(Diary):
    """By an iterator. Notes when it starts and stops."""

    def stream(self, request: Mapping[str, Array]) -> Iterator[Any]:
        wish = Wish(request)
        self.note("start", wish.nonce)
        try:
            while wish.number < wish.pieces:
                while self.shut(wish):
                    time.sleep(0.005)
                if wish.wrong in (NO_PIECE, BAD_TEXT) and wish.number == wish.at:
                    yield 5 if wish.wrong == NO_PIECE else "\ud800"
                yield wish.next()
                if self.ms:
                    time.sleep(self.ms / 1000)
        finally:
            self.note("stop", wish.nonce)


class Steps(Diary):
    """By steps. Notes when a stream starts and stops, and for each step how many took part."""

    def start(self, request: Mapping[str, Array]) -> Wish:
        wish = Wish(request)
        if wish.wrong == RAISE and wish.at < 0:
            raise ValueError("cannot start")
        time.sleep(self.start_ms / 1000)
        self.note("start", wish.nonce)
        return wish

    def step(self, states: Sequence[Wish]) -> Sequence[Any]:
        self.note("step", len(states))
        time.sleep(max(self.ms, 1 if any(map(self.shut, states)) else 0) / 1000)
        answers = [self.advance(wish) for wish in states]
        return answers[1:] if TOO_FEW in answers else answers

    def advance(self, wish: Wish) -> object:
        if self.shut(wish):
            return ""
        if wish.wrong and wish.number == wish.at:
            if wish.wrong == RAISE_ALL:
                raise ValueError("lost them all")
            if wish.wrong in (NO_PIECE, TOO_FEW):
                return wish.wrong
            if wish.wrong == BAD_TEXT:
                return "\ud800"
            try:
                go_wrong(wish.wrong)
            except Exception as error:
                return error
        if wish.number >= wish.pieces:
            return None
        said = wish.next()
        # Either way to end, by turns.
        return Last(said) if wish.number == wish.pieces and wish.nonce % 2 else said

    def stop(self, state: Wish) -> None:
        self.note("stop", state.nonce)


class Both(Steps):
    """Predicts, too: x float32 () → y, the same, beside the inputs of a stream."""

    inputs = (*INPUTS, TensorSpec("x", "float32"))
    outputs = (TensorSpec("y", "float32"),)

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        self.note("predict", len(batch["x"]))
        return {"y": batch["x"]}


class Reads:
    """x float32 (any,), however long → at each piece the sum of it, `pieces` times, as the iterator comes to it."""

    inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32", (-1,)), TensorSpec("pieces", "int64"))
    outputs: Sequence[TensorSpec] = ()

    def load(self) -> None: ...

    def stream(self, request: Mapping[str, Array]) -> Iterator[str]:
        for _ in range(int(request["pieces"])):
            yield f"{float(request['x'].sum()):.0f} "

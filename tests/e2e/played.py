"""A model whose streams say what a test lets them say, when it does."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from workers.model import Array, TensorSpec


class Played:
    """Streams the file `<place>/<script>`, in which each line is JSON and is played once it is whole: a text is a
    piece, null the end of the stream, `{"fail": why}` its failure. At the end of the file it waits for more.

    `begin`: how many pieces the client has had already. What follows these at once, if it is no piece, it has had too.

    Predicts how many streams are live and how many pieces have been made since the start."""

    inputs: Sequence[TensorSpec] = (TensorSpec("script", "int64"), TensorSpec("begin", "int64"))
    outputs: Sequence[TensorSpec] = (TensorSpec("live", "int64"), TensorSpec("made", "int64"))

    def __init__(self, place: str) -> None:
        self.place = Path(place)
        self.live = self.made = 0

    def load(self) -> None: ...

    def start(self, request: Mapping[str, Array]) -> Reading:
        reading = Reading(self.place / str(int(request["script"])), int(request["begin"]))
        self.live += 1
        return reading

    def step(self, states: Sequence[Reading]) -> Sequence[str | Exception | None]:
        time.sleep(0.001)  # it looks again, and again
        return [self._one(state) for state in states]

    def _one(self, reading: Reading) -> str | Exception | None:
        line = reading.line()
        if isinstance(line, dict):
            return ValueError(line["fail"])
        self.made += bool(line)
        return line

    def stop(self, reading: Reading) -> None:
        reading.file.close()
        self.live -= 1

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        rows = len(batch["script"])
        return {"live": np.full(rows, self.live), "made": np.full(rows, self.made)}


class Reading:
    """One stream's way through its script."""

    def __init__(self, path: Path, begin: int) -> None:
        # The warm-up has no script.
        self.file: BinaryIO = path.open("rb") if path.exists() else io.BytesIO(b"null\n")
        self.had = begin
        self.skipping = begin > 0

    def line(self) -> str | dict[str, str] | None:
        """What comes next, "" if nothing has been written yet."""
        while True:
            at = self.file.tell()
            text = self.file.readline()
            if not text.endswith(b"\n"):
                self.file.seek(at)
                return ""
            line: str | dict[str, str] | None = json.loads(text)
            if isinstance(line, str) and self.had:
                self.had -= 1
            elif isinstance(line, str) or not self.skipping:
                self.skipping = False
                return line

"""A program of a user's that runs a pool with models no import could find: one of `__main__`, one a closure."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from workers import TensorSpec, ThreadClient
from workers.config import ArenaConfig, ModelConfig, PoolConfig
from workers.model import Array, Model
from workers.pool import Pool


class Double:
    inputs: Sequence[TensorSpec] = (TensorSpec("x", "float32"),)
    outputs: Sequence[TensorSpec] = (TensorSpec("y", "float32"),)

    def load(self) -> None: ...

    def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"y": batch["x"] * 2}


def times(factor: float) -> type[Model]:
    class Times(Double):
        def predict(self, batch: Mapping[str, Array]) -> Mapping[str, Array]:
            return {"y": batch["x"] * np.float32(factor)}

    return Times


def ask(socket_path: str, lifeline: int) -> None:
    try:
        with ThreadClient(socket_path) as client:
            client.wait_ready(30)
            one = {"x": np.ones(1, np.float32)}
            print(client.predict("double", one)["y"][0], client.predict("seven", one)["y"][0])
    finally:
        os.close(lifeline)


if __name__ == "__main__":
    read, write = os.pipe()
    models = (ModelConfig("double", Double), ModelConfig("seven", times(7)))
    pool = Pool(PoolConfig(models, ArenaConfig()), sys.argv[1], read)
    asking = threading.Thread(target=ask, args=(sys.argv[1], write))
    asking.start()
    pool.run()
    asking.join()

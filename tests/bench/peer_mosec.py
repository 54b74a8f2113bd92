"""A peer: mosec, an HTTP server in Rust before a Python process that computes. Runs in mosec's own environment.

It does not batch by itself; with `--batch` it takes up to 16 requests at a time, and waits 1 ms for them, the least
there is.
"""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, Worker

from tests.bench.score import score


class Score(Worker):  # type: ignore[misc]
    def forward(self, data: Any) -> Any:
        if isinstance(data, list):  # a batch
            return [self.forward(one) for one in data]
        return {"scores": score(data["features"])}


if __name__ == "__main__":
    server = Server()
    if "--batch" in sys.argv:
        server.append_worker(Score, num=1, max_batch_size=16, max_wait_time=1, route="/score")
    else:
        server.append_worker(Score, num=1, route="/score")
    server.run()

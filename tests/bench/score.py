"""The model `score` in plain numpy, as the peers compute it: it needs nothing of Headrace."""

from __future__ import annotations

import numpy as np

_WEIGHT = np.full((4, 2), 0.5, np.float32)
_BIAS = np.full(2, 0.25, np.float32)


def score(features: list[float]) -> list[float]:
    scores: list[float] = (np.asarray(features, np.float32) @ _WEIGHT + _BIAS).tolist()
    return scores

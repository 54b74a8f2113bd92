from __future__ import annotations

import numpy as np
import pytest

from workers.config import load
from workers.model import resolve
from workers.models.dense import Dense


@pytest.fixture
def dense() -> Dense:
    model = Dense()
    model.load()
    return model


def test_the_configured_score_model_is_dense() -> None:
    (score,) = [model for model in load(None).models if model.name == "score"]
    assert isinstance(score.model, str)
    assert resolve(score.model) is Dense


def test_scores_are_half_the_sum_and_a_quarter_for_every_row(dense: Dense) -> None:
    features = np.array([[1, 2, 3, 4], [0, 0, 0, 0], [0.1, 0.2, 0.3, 0.41]], np.float32)
    features.flags.writeable = False
    scores = dense.predict({"features": features})["scores"]
    assert scores.dtype == np.float32
    assert scores.tolist() == [[5.25, 5.25], [0.25, 0.25], [np.float32(0.755)] * 2]


def test_a_rows_scores_do_not_depend_on_its_batch(dense: Dense) -> None:
    features = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    alone = [dense.predict({"features": features[i : i + 1]})["scores"] for i in range(64)]
    for rows in (2, 3, 8, 33, 64):
        together = dense.predict({"features": features[:rows]})["scores"]
        assert together.tobytes() == np.concatenate(alone[:rows]).tobytes()


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_there_are_as_many_rows_out_as_in(dense: Dense, rows: int) -> None:
    assert dense.predict({"features": np.ones((rows, 4), np.float32)})["scores"].shape == (rows, 2)


@pytest.mark.parametrize("value", [3.4e38, -3.4e38, np.inf, np.nan])
def test_overflow_is_infinite_without_a_warning(dense: Dense, value: float) -> None:
    scores = dense.predict({"features": np.full((1, 4), value, np.float32)})["scores"]
    assert scores.dtype == np.float32
    assert not np.isfinite(scores).any()
    dense.predict({"features": np.array([[np.inf, -np.inf, value, value]], np.float32)})

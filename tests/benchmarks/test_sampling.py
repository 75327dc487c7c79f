"""The benchmark of norm estimators: what it computes is what layers would do, and the table says it."""

import statistics

import pytest
import torch
from helpers import tiny_model, token_ids

from benchmarks import sampling
from rmm_linear.estimators import norm_estimators


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model, batches = tiny_model("roberta", dropout=0.0).train(), []
    for step in range(8):
        ids = token_ids(16, 20).roll(step, 0)
        mask = torch.ones_like(ids)
        mask[8:, 11:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2})
    return sampling.measure(model, batches, learning_rate=1e-3)


def test_every_kind_and_estimator_is_measured_on_every_layer(found):
    names = {"none", "oracle", *norm_estimators()}
    assert set(found) == {("rows", ""), ("countsketch", ""), *((k, n) for k in ("wta", "norm_rows") for n in names)}
    assert {len(layers) for layers in found.values()} == {12}


def test_who_knows_the_norms_is_the_quietest_and_winners_help(found):
    """Σ d/p is least for p ∝ ‖x‖‖y‖ (the mix with uniform apart), and theorem 2 holds for every layer."""
    middle = {key: statistics.median(layers) for key, layers in found.items()}
    for name in (*norm_estimators(), "oracle"):
        assert middle["norm_rows", "oracle"] <= middle["norm_rows", name]
        assert all(w <= n * (1 + 1e-9) for w, n in zip(found["wta", name], found["norm_rows", name], strict=True))
    assert middle["wta", "position"] < middle["wta", "none"]

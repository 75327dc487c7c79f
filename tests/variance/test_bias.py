"""Bias of a whole model's gradient: none but that of attention, which is small compared with its noise."""

import math
from typing import NamedTuple

import pytest
import torch
from helpers import tiny_model
from probe_helpers import padded_batch
from statistical import assert_projections
from torch import Tensor

from rmm_linear import convert
from rmm_linear.config import OPERATIONS
from rmm_linear.conversion.exact import exact_but, set_aside
from rmm_linear.variance.passes import Passes, measuring

DRAWS = 4000
GROUPS = 20
# Two checks for each of about 40 parameters of two models: at z = 5, one of 160 fails by chance as often (9e-5) as a
# single one at the z = 4 of the other tests.
Z = 5.0
# Sums of some thousand terms in float32, in another order: chunks of logits, and gradients without noise.
ROUNDING = 1e-5


class Draws(NamedTuple):
    """Errors of M draws of the gradients of all parameters, by their names; exact gradients are float64 and flat."""

    exact: dict[str, Tensor]
    means: dict[str, Tensor]  # the mean error of each of 20 groups of draws, shape (20, elements)
    squares: dict[str, Tensor]  # ‖error‖² of every draw, shape (M,)
    projections: dict[str, Tensor]  # ⟨ĝ, g⟩ of every draw, shape (M,)


def drawn(architecture, operations, draws, sharpness=1.0):
    """Gradients of a tiny model with some operations converted: the same batch and dropout, other seeds."""
    model, batch = tiny_model(architecture, dropout=0.1).train(), padded_batch()
    if architecture == "llama":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for name, parameter in model.named_parameters():
        if name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
            parameter.data.mul_(sharpness)
    convert(model, min_rows=4)
    torch.manual_seed(11)
    passes = Passes(model, batch)
    with measuring(model), set_aside(model) as (context,):
        with exact_but(model):
            exact = {n: g.double().flatten() for n, g in zip(passes.trained, passes.gradients(), strict=True)}
        found = Draws(
            exact,
            {name: one.new_zeros(GROUPS, len(one)) for name, one in exact.items()},
            *({name: one.new_zeros(draws) for name, one in exact.items()} for _ in range(2)),
        )
        with exact_but(model, operations):
            for draw in range(draws):
                context.salt = draw + 1
                for (name, right), gradient in zip(exact.items(), passes.gradients(), strict=True):
                    error = gradient.double().flatten() - right
                    found.means[name][draw % GROUPS] += error * GROUPS / draws
                    found.squares[name][draw] = error.square().sum()
                    found.projections[name][draw] = error @ right + right @ right
    return found


@pytest.mark.parametrize(
    "draws", [pytest.param(60, id="light"), pytest.param(DRAWS, id="heavy", marks=pytest.mark.montecarlo)]
)
@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_all_operations_but_attention_are_unbiased(architecture, draws):
    found = drawn(architecture, [name for name in OPERATIONS if name != "attention"], draws)
    total = sum(float(one @ one) for one in found.exact.values())
    tails, scores, random = [], [], 0
    for name, exact in found.exact.items():
        size, square = float(exact @ exact), float(found.squares[name].mean())
        if size < 1e-12 * total:  # the biases of keys, to which softmax is blind
            assert square < 1e-12 * total, name
            continue
        # Scale: the projection's mean is 1.
        values = found.projections[name] / size
        assert_projections(values, widest=4 / math.sqrt(draws), z=Z, room=ROUNDING)
        # Mean: M ‖mean error‖² is on average the variance, with a tail of at most that of one χ²₁ times it.
        bias = float(found.means[name].mean(0).square().sum())
        assert bias < Z**2 * square / draws + ROUNDING**2 * size, name
        if square > ROUNDING**2 * size:
            random += 1
            tails.append(draws * bias / square)
            scores.append(float((values.mean() - 1) / values.std() * math.sqrt(draws)))
    noise = sum(float(one.mean()) for one in found.squares.values()) / total
    print(f"{architecture}: {random} of {len(found.exact)} gradients are random, noise by ‖g‖² {noise:.3g}")
    print(f"projections: |z| at most {max(map(abs, scores)):.2f}; M bias² / variance at most {max(tails):.2f}")
    assert random > 0.7 * len(found.exact)


@pytest.mark.montecarlo
@pytest.mark.parametrize(("architecture", "sharpness"), [("roberta", 15.0), ("llama", 12.0)])
def test_the_bias_of_attention_is_small_beside_its_noise(architecture, sharpness):
    """With weights of queries and keys that give scores a deviation of about 1, as trained ones do."""
    found = drawn(architecture, ["attention"], DRAWS, sharpness)
    means = torch.cat(list(found.means.values()), 1)
    # Two groups' mean errors are independent, so their inner product has the mean ‖bias‖², whatever the noise is.
    products = (means @ means.T)[tuple(torch.triu_indices(GROUPS, GROUPS, 1))]
    square = sum(float(one.mean()) for one in found.squares.values())
    bias, error = float(products.mean()), float(products.std()) / len(products) ** 0.5
    variance = square - bias
    print(f"{architecture}: bias² / variance {bias / variance:.5f}, standard error {error / variance:.5f}")
    assert error < 0.0005 * variance
    assert bias < 0.002 * variance

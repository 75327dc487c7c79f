"""A converted model that is exact for a while computes and saves what the original model does."""

import pytest
import torch
from helpers import ALL_ARCHITECTURES, batch_of, gradients, loss_of, snapshot, tiny_model
from torch import nn

from rmm_linear import convert, revert, tile
from rmm_linear.config import OPERATIONS
from rmm_linear.conversion.exact import converted_modules, exact_but, set_aside
from rmm_linear.memory import explain, track_saved
from rmm_linear.planning import BlockPlan, PlannedBlock
from rmm_linear.variance import gradient_noise


def step(model, architecture):
    """Saved bytes, and loss and gradients, which begin from the same random numbers every time."""
    torch.manual_seed(6)
    model.zero_grad(set_to_none=True)
    with track_saved(model) as saved:
        loss = loss_of(model, architecture)
    loss.backward()
    return saved.total, {"loss": loss.detach(), **gradients(model)}


TRIALS = {
    "explain": explain,
    "noise": lambda model, batch: gradient_noise(model, batch, draws=1, by_operation=False),
    "dry run": lambda model, batch: convert(model, example=batch, dry_run=True),
    "conversion": lambda model, batch: convert(model, example=batch),
}


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("has_plan", [False, True])
def test_a_plan_and_tiles_outlive_a_trial_conversion(trial, has_plan):
    model, batch = tiny_model("roberta", dropout=0.0).train(), batch_of("roberta") | {"labels": torch.arange(4) % 2}
    if has_plan:
        BlockPlan([PlannedBlock("roberta.encoder.layer.0", "recompute")]).apply(model)
    else:
        tile(model, rows=64)
    before = {name: vars(one)["forward"] for name, one in model.named_modules() if "forward" in vars(one)}
    assert before
    TRIALS[trial](model, batch)
    after = {name: vars(one).get("forward") for name, one in model.named_modules() if "forward" in vars(one)}
    assert after == before
    revert(model)
    assert not any("forward" in vars(one) for one in model.modules())
    assert not converted_modules(model)


def test_hooks_go_with_modules_that_were_replaced():
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))
    before = snapshot(model)
    convert(model)
    model[2] = nn.Linear(32, 32)
    revert(model)
    assert snapshot(model) == before
    parts = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert(parts, min_rows=1)
    revert(parts[0])
    assert len(parts._forward_pre_hooks) == 1  # for the other
    revert(parts[1])
    assert not parts._forward_pre_hooks


@pytest.mark.parametrize("architecture", [*ALL_ARCHITECTURES, "resnet"])
def test_everything_is_that_of_the_original_model(architecture):
    original, model = (tiny_model(architecture, dropout=0.1).train() for _ in range(2))
    convert(model, min_rows=4)
    before = snapshot(model)
    expected = step(original, architecture)
    with exact_but(model):
        assert not converted_modules(model)
        found = step(model, architecture)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())
    assert snapshot(model) == before
    assert step(model, architecture)[0] < 0.9 * expected[0]


@pytest.mark.parametrize("architecture", ["roberta", "llama"])
@pytest.mark.parametrize("operation", OPERATIONS[:5])
def test_one_operation_stays_converted(architecture, operation):
    """Saved bytes are those of a conversion of this operation alone, and so is the gradient, but for its seeds."""
    alone, model = (tiny_model(architecture, dropout=0.1).train() for _ in range(2))
    if architecture == "llama" and operation == "dropout":
        with exact_but(model, [operation]):  # it has none
            assert not converted_modules(model)
        return
    convert(alone, min_rows=4, operations=[operation])
    convert(model, min_rows=4)
    with exact_but(model, [operation]):
        kept = [module.rmm_operation for module in converted_modules(model)]
        assert set(kept) == {operation}
        assert len(kept) == len(converted_modules(alone))
        found = step(model, architecture)
    expected = step(alone, architecture)
    assert found[0] == expected[0]
    assert torch.equal(found[1]["loss"], expected[1]["loss"])


def test_classes_come_back_after_an_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    convert(model, min_rows=1)
    before = snapshot(model)

    def interrupted_exact():
        with exact_but(model):
            assert type(model[0]) is nn.Linear
            raise KeyboardInterrupt

    def interrupted_aside():
        with set_aside(model) as contexts:
            assert contexts == [model[0].rmm_context]
            model[1].rmm_more, contexts[0].salt = 1, 5
            raise KeyboardInterrupt

    for interrupted in (interrupted_exact, interrupted_aside):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert snapshot(model) == before
    assert model[0].rmm_context.salt == 0

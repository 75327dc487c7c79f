"""GradientProbe measures the passes that it is told to, and the same X and Y under activation checkpointing."""

import pytest
import torch
from cases import CONFIG, checkpoints
from helpers import Mlp, checkpointed, enable_checkpointing, six_features, tiny_model
from probe_helpers import padded_batch, rows_of, same, values, watched
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert
from rmm_linear.context.surroundings import in_backward
from rmm_linear.variance import GradientProbe

# Which passes


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_every_n_counts_passes_in_training_mode_with_gradients(every):
    model = Mlp()
    with GradientProbe(model, every=every, config=CONFIG) as probe:
        for _ in range(6):
            model.train()
            model(torch.randn(40, 12)).sum().backward()
            with torch.no_grad():
                model(torch.randn(40, 12))
            model.eval()
            model(torch.randn(40, 12)).sum().backward()
    assert probe.passes == 6
    assert [row.step for row in probe.rows if row.module == "first"] == list(range(every, 7, every))


def test_arm_looks_at_the_next_pass_only():
    model = Mlp()
    with GradientProbe(model, every=None, config=CONFIG) as probe:
        for step in range(4):
            if step == 2:
                probe.arm(117)
            model(torch.randn(40, 12)).sum().backward()
    assert [(row.step, row.module) for row in probe.rows] == [(117, "first"), (117, "second")]


def test_frozen_layers_and_sketched_ones_in_eval_mode_have_no_gradient():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    convert(model, CONFIG)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    with GradientProbe(model, every=1) as probe:
        out = model[2](model[0](six_features()))
        model(six_features())
        (out + model[2](model[0](six_features()))).sum().backward()
    assert {row.module for row in probe.rows} == {"2"}


# Checkpointing


@checkpoints
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_checkpointing_gives_the_same_numbers(reentrant, converted):
    batch, found = padded_batch(), []
    for enable in (False, True):
        model = tiny_model("roberta", dropout=0.0).train()
        if converted:
            convert(model, CONFIG)
        if enable:
            enable_checkpointing(model, reentrant)
        found.append(rows_of(model, lambda model: model(**batch).loss.backward(), config=CONFIG))
    assert len(found[0]) == 14
    same(*found)


@checkpoints
def test_layers_that_are_recomputed_exactly_have_no_noise(reentrant):
    """The layer outside of the checkpoint has; and all have where sketches are made in the recomputation."""
    found = {}
    for mode in ("exact", "packed"):
        model = checkpointed(use_reentrant=reentrant, dropout=0.0)
        convert(model, CONFIG.replace(checkpointed=mode))
        rows = rows_of(model, lambda model: model(six_features()).square().sum().backward())
        found[mode] = {row.module: row for row in rows}
    exact, packed = found["exact"], found["packed"]
    assert list(exact) == list(packed) == ["block.0", "block.2", "head"]
    assert all(row.sketch_variance > 0 for row in packed.values())
    assert [row.sketch_variance for row in exact.values()] == [0, 0, packed["head"].sketch_variance]
    assert [(row.noise, row.rows, row.bits) for row in exact.values()][:2] == [(0, 40, 32)] * 2
    assert all(exact[name].sgd_variance == packed[name].sgd_variance for name in exact)


@checkpoints
def test_under_checkpointing_x_is_held_in_the_recomputation_only(reentrant):
    model = checkpointed(use_reentrant=reentrant, dropout=0.0)
    alive = watched(model.block[2])
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        loss = model(six_features()).square().sum()
        assert [ref.expired() for ref in alive] == [True]
        loss.backward()
        assert all(ref.expired() for ref in alive)
    assert [row.module for row in probe.rows] == ["block.0", "block.2", "head"]


@checkpoints
@pytest.mark.parametrize("within", ["one region", "two regions"])
def test_several_calls_under_checkpointing(reentrant, within):
    """Each recomputed X meets the Y of its own call."""

    class Twice(nn.Module):
        def __init__(self, region):
            super().__init__()
            self.layer, self.region = nn.Linear(6, 6), region

        def forward(self, x):
            if within == "one region":
                return self.region(lambda x: self.layer(torch.tanh(self.layer(x))), x)
            return self.region(self.layer, torch.tanh(self.region(self.layer, x)))

    def recompute(function, x):
        return checkpoint(function, x, use_reentrant=reentrant)

    found = []
    for region in (lambda function, x: function(x), recompute):
        torch.manual_seed(0)
        run = lambda model: model(six_features()).square().sum().backward()  # noqa: E731
        found.append(rows_of(Twice(region), run, config=CONFIG))
    assert len(found[0]) == 2
    assert values(found[0][0]) != pytest.approx(values(found[0][1]), rel=0.01)
    same(*found)


@checkpoints
@pytest.mark.parametrize("joint", [True, False], ids=["one backward", "two backwards"])
@pytest.mark.parametrize("looked_at", [1, 2])
def test_several_passes_wait_for_their_backward(reentrant, joint, looked_at):
    """Only one of them is measured, and recomputations of the other are told from its own."""
    inputs, found = [six_features(), (3 * six_features().flip(0)).detach().requires_grad_()], []
    for mode in (None, reentrant):
        model = checkpointed(use_reentrant=mode, dropout=0.0)
        with GradientProbe(model, every=None, config=CONFIG) as probe:
            losses = []
            for number, x in enumerate(inputs, start=1):
                if number == looked_at:
                    probe.arm(number)
                losses.append(model(x).square().sum())
            for loss in [sum(losses)] if joint else losses:
                loss.backward()
        found.append(probe.rows)
    assert len(found[0]) == 3
    same(*found)


@checkpoints
def test_an_interrupted_recomputation_is_forgotten(reentrant):
    model = checkpointed(use_reentrant=reentrant, dropout=0.0)
    inputs = [(scale * six_features()).detach().requires_grad_() for scale in range(1, 5)]
    alive = []

    def fail(module, args):
        if in_backward():
            alive.append(StorageWeakRef(args[0].untyped_storage()))
            raise KeyboardInterrupt

    with GradientProbe(model, every=2, config=CONFIG) as probe:
        model(inputs[0]).sum().backward()
        loss = model(inputs[1]).sum()
        handle = model.block[2].register_forward_pre_hook(fail, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        handle.remove()
        del loss
        for x in inputs[2:]:
            model(x).sum().backward()
            assert alive[0].expired()
    names = ("block.0", "block.2", "head")
    assert [(row.step, row.module) for row in probe.rows] == [(2, "head"), *((4, name) for name in names)]

"""GradientProbe: its numbers are those of the closed forms on the X and Y of the step, and training does not notice."""

import gc
import math
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pandas as pd
import pytest
import torch
from helpers import (
    Checkpointed,
    Mlp,
    checkpointed,
    gradients,
    heavy_tailed,
    six_features,
    snapshot,
    tiny_model,
    token_ids,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear, convert
from rmm_linear.kept import keep
from rmm_linear.memory import track_saved
from rmm_linear.scope import in_backward
from rmm_linear.sketches import SAMPLERS, probabilities, row_norms
from rmm_linear.variance import GradientProbe, sgd_variance, sketch_variance
from rmm_linear.variance.calls import noise
from rmm_linear.variance.results import COLUMNS, ProbeResults, ProbeRow

ROUGH = RMMConfig(kind="countsketch", ratio=0.25, min_rows=1)
checkpoints = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def padded_batch(batch=4, length=20):
    ids = token_ids(batch, length)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, length - 3 * row :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def recorded(model, run):
    """X and Y of every call of every layer during ``run()``, in order."""
    calls, handles = {}, []

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            calls.setdefault(name, []).append((args[0].detach().flatten(0, -2).clone(), output))

        return hook

    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D", "RMMLinear", "RMMConv1D"):
            handles.append(module.register_forward_hook(keep(name)))
    run()
    for handle in handles:
        handle.remove()
    return {name: [(x, out.grad.flatten(0, -2)) for x, out in found] for name, found in calls.items()}


def by_hand(x, y, *, config, samples, mask=None, bits=None):
    """α, D²_SGD, D²_sketch, K."""
    x, y = x.double(), y.double()
    g = torch.einsum("ni,no->io", x, y).square().sum()
    alpha = g / (x.square().sum() * y.square().sum())
    sgd = sgd_variance(x, y, samples=samples)
    rows = max(config.min_rows, round(config.ratio * len(x)))
    shape = {"kind": config.kind, "rows": rows, "bits": bits, "block": config.block}
    return float(alpha), float(sgd), float(sketch_variance(x, y, **shape, mask=mask, draws=1)), rows


def values(row):
    return row.alpha, row.sgd_variance, row.sketch_variance, row.noise


def close(row, alpha, sgd, sketched, rtol=1e-4):
    assert row.alpha == pytest.approx(alpha, rel=rtol)
    assert row.sgd_variance == pytest.approx(sgd, rel=rtol)
    assert row.sketch_variance == pytest.approx(sketched, rel=rtol)
    assert row.noise == pytest.approx(sketched / sgd, rel=rtol)


def same(first, second, rtol=1e-4):
    assert [(r.step, r.module, r.kind, r.rows, r.bits, r.tokens) for r in first] == [
        (r.step, r.module, r.kind, r.rows, r.bits, r.tokens) for r in second
    ]
    for one, other in zip(first, second, strict=True):
        assert values(one) == pytest.approx(values(other), rel=rtol), one.module


# The numbers


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
@pytest.mark.parametrize(
    ("config", "bits"),
    [
        (ROUGH, None),
        (RMMConfig(kind="gaussian", ratio=0.25, min_rows=1, mask_padding=False), None),
        (RMMConfig(kind="rademacher", ratio=0.25, min_rows=1, block=16), None),
        (RMMConfig(kind="rows", ratio=0.25, min_rows=1, bits=4), 4),
        (RMMConfig(kind="wta", ratio=0.25, min_rows=1), None),
    ],
    ids=["countsketch", "gaussian, padding too", "blocks", "rows in 4 bits", "wta"],
)
def test_values_are_those_of_the_closed_forms(converted, config, bits):
    model, batch = tiny_model("roberta", dropout=0.0), padded_batch()
    if converted:
        convert(model, config)
    model.train()

    def run():
        with GradientProbe(model, every=1, config=None if converted else config) as probe:
            model(**batch).loss.backward()
        return probe.rows

    found = {}
    seen = recorded(model, lambda: found.update({row.module: row for row in run()}))
    assert list(found) == [n for n, m in model.named_modules() if "Linear" in type(m).__name__]
    mask = batch["attention_mask"].flatten() if config.mask_padding else None
    for name, row in found.items():
        ((x, y),) = seen[name]
        if name.startswith("classifier"):  # one row per sequence, and no mask of that size
            assert row.tokens == 4
            assert row.rows == config.recipe(4, 16, 4).rows
            continue
        alpha, sgd, sketched, rows = by_hand(x, y, config=config, samples=(4, 20), mask=mask, bits=bits)
        assert (row.kind, row.rows, row.bits, row.tokens) == (config.kind, rows, bits or 32, 80)
        assert 0 < row.alpha < 1
        assert row.sketch_variance > 0
        close(row, alpha, sgd, sketched)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_noise_of_drawn_rows_goes_by_what_the_layer_expected(kind, monkeypatch):
    """The ŷ that every sketch was made with, the siblings' joint one too, is the one in the row's variance."""
    model, batch = tiny_model("roberta", dropout=0.0).train(), padded_batch()
    convert(model, kind=kind, ratio=0.25, min_rows=1, norm_estimator="position", target_modules=r".*attention.*")
    for _ in range(2):
        model(**batch).loss.backward()
    drawn = {}

    def look(x, recipe, seed, mask, expected):
        drawn[x.data_ptr()] = probabilities(row_norms(x), recipe.uniform_mix, expected, mask)
        assert expected is not None
        return keep(x, recipe, seed, mask, expected)

    monkeypatch.setattr("rmm_linear.functional.keep", look)
    inputs, gradients, found = {}, {}, []

    def run():
        with GradientProbe(model, every=1) as probe:
            model(**batch).loss.backward()
        found.extend(probe.rows)

    def hook(name):
        def see(module, args, output):
            inputs[name] = args[0].detach().flatten(0, 1)
            output.register_hook(lambda y: gradients.update({name: y.flatten(0, 1)}))

        return see

    names = {name: module for name, module in model.named_modules() if isinstance(module, RMMLinear)}
    for name, module in names.items():
        module.register_forward_hook(hook(name))
    run()
    assert [row.module for row in found] == list(names)
    for row in found:
        x, y, mask = inputs[row.module], gradients[row.module], batch["attention_mask"].flatten()
        shape = {"kind": kind, "rows": row.rows, "mask": mask}
        exact = sketch_variance(x, y, probabilities=drawn[x.data_ptr()], **shape)
        assert math.isclose(row.sketch_variance, float(exact), rel_tol=1e-6)
        assert not math.isclose(row.sketch_variance, float(sketch_variance(x, y, **shape)), rel_tol=1e-3)


def test_a_layer_that_sees_few_rows_adds_no_noise():
    model = Mlp()
    convert(model, ratio=0.1, min_rows=64)
    with GradientProbe(model, every=1) as probe:
        model(torch.randn(50, 12)).square().sum().backward()
    assert [(row.rows, row.tokens, row.sketch_variance, row.noise) for row in probe.rows] == [(50, 50, 0.0, 0.0)] * 2
    assert all(row.sgd_variance > 0 for row in probe.rows)


def test_auto_bits_are_those_that_the_layer_uses():
    model = nn.Sequential(nn.Linear(64, 8))
    report = convert(model, memory=0.1, min_rows=1)
    with GradientProbe(model, every=5) as probe:
        for _ in range(5):
            model(torch.randn(300, 64)).square().sum().backward()
    (row,) = probe.rows
    assert row.bits == report.bits["0"]
    assert row.rows == RMMConfig(memory=0.1, min_rows=1).recipe(300, 64, 4, row.bits).rows


@pytest.mark.parametrize(
    ("shape", "samples"), [((4, 10, 12), (4, 10)), ((40, 12), None), ((1, 40, 12), None), ((2, 4, 5, 12), (2, 20))]
)
def test_samples_are_sequences_where_the_shape_tells(shape, samples):
    model, x = Mlp(), torch.randn(shape)
    with GradientProbe(model, every=1, modules=["first"], config=ROUGH) as probe:
        seen = recorded(model, lambda: model(x).square().sum().backward())
    ((x, y),) = seen["first"]
    assert probe.rows[0].sgd_variance == pytest.approx(float(sgd_variance(x, y, samples=samples)), rel=1e-6)


class Flattening(nn.Module):
    """Flattens its tokens before the layer, as some decoders do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, attention_mask):
        return self.layer(x.flatten(0, 1)).view(*x.shape[:2], 3) * attention_mask.unsqueeze(-1)


def test_the_attention_mask_tells_sequences_of_flattened_tokens():
    model, x, mask = Flattening(), torch.randn(4, 10, 6), torch.ones(4, 10)
    mask[1:, 6:] = 0
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        seen = recorded(model, lambda: model(x, attention_mask=mask).square().sum().backward())
    ((x, y),) = seen["layer"]
    alpha, sgd, sketched, _ = by_hand(x, y, config=ROUGH, samples=(4, 10), mask=mask.flatten())
    close(probe.rows[0], alpha, sgd, sketched)


def test_a_mask_that_no_layer_could_use_is_not_used():
    class Pooling(Flattening):
        def forward(self, x, attention_mask):
            return self.layer(x)

    model, x, mask = Pooling(), torch.randn(4, 10, 6), torch.ones(4, 10)
    mask[1:, 6:] = 0
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        seen = recorded(model, lambda: model(x, attention_mask=mask).square().sum().backward())
    ((x, y),) = seen["layer"]
    alpha, sgd, sketched, _ = by_hand(x, y, config=ROUGH, samples=(4, 10))
    close(probe.rows[0], alpha, sgd, sketched)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_other_architectures(architecture):
    """GPT-2's Conv1D has a transposed weight; decoders make a 4-dimensional mask inside."""
    model, batch = tiny_model(architecture, dropout=0.0), padded_batch()
    batch["labels"] = (
        batch["labels"]
        if architecture == "bert"
        else batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    )
    convert(model, ROUGH)
    model.train()
    with GradientProbe(model, every=1) as probe:
        seen = recorded(model, lambda: model(**batch).loss.backward())
    layers = [row for row in probe.rows if row.tokens == 80]
    assert len(layers) >= 8
    for row in layers:
        ((x, y),) = seen[row.module]
        mask = batch["attention_mask"].flatten()
        alpha, sgd, sketched, rows = by_hand(x, y, config=ROUGH, samples=(4, 20), mask=mask)
        assert row.rows == rows
        close(row, alpha, sgd, sketched)


def test_autocast():
    model, batch = tiny_model("roberta", dropout=0.0), padded_batch()
    convert(model, memory=0.2, bits=None, min_rows=1)
    model.train()
    with GradientProbe(model, every=1) as probe, torch.autocast("cpu", torch.bfloat16):
        seen = recorded(model, lambda: model(**batch).loss.backward())
    name = "roberta.encoder.layer.1.output.dense"
    (row,) = [row for row in probe.rows if row.module == name]
    ((x, y),) = seen[name]
    assert (y.dtype, row.bits, row.rows) == (torch.bfloat16, 16, 16)
    config = RMMConfig(ratio=0.2, min_rows=1)
    close(row, *by_hand(x, y, config=config, samples=(4, 20), mask=batch["attention_mask"].flatten())[:3])


def test_a_layer_that_is_called_several_times():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model.append(model[0])
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        seen = recorded(model, lambda: model(six_features()).square().sum().backward())
    assert len(probe.rows) == 2
    for row, (x, y) in zip(probe.rows, seen["0"], strict=True):
        close(row, *by_hand(x, y, config=ROUGH, samples=None)[:3])


@pytest.mark.parametrize("converted", [True, False])
def test_an_activation_in_place_behind_the_layer(converted):
    rows = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))
        if converted:
            convert(model, ROUGH)
        with GradientProbe(model, every=1, config=ROUGH) as probe:
            model(six_features()).square().sum().backward()
        rows.append(probe.rows)
    assert len(rows[0]) == 2
    same(*rows)


def test_hooks_of_others_that_change_input_and_output():
    """X and Y are the layer's own: after pre-hooks that change the input, before hooks that change the output."""
    model = nn.Sequential(nn.Linear(6, 4))
    model[0].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model[0].register_forward_hook(lambda module, args, output: 3 * output)
    x = six_features().detach()
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        model(x).sum().backward()
    y = torch.full((40, 4), 3.0)
    close(probe.rows[0], *by_hand(2 * x, y, config=ROUGH, samples=None)[:3])


# Which passes


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_every_n_counts_passes_in_training_mode_with_gradients(every):
    model = Mlp()
    with GradientProbe(model, every=every, config=ROUGH) as probe:
        for _ in range(6):
            model.train()
            model(torch.randn(40, 12)).sum().backward()
            with torch.no_grad():
                model(torch.randn(40, 12))
            model.eval()
            model(torch.randn(40, 12)).sum().backward()
    assert probe.passes == 6
    assert [row.step for row in probe.rows if row.module == "first"] == list(range(every, 7, every))


def test_gradient_accumulation_looks_at_single_passes():
    model, inputs = Mlp(), [torch.randn(40, 12) for _ in range(4)]
    with GradientProbe(model, every=2, modules=["first"], config=ROUGH) as probe:
        seen = recorded(model, lambda: [model(x).square().sum().backward() for x in inputs])
    assert [row.step for row in probe.rows] == [2, 4]
    for row, (x, y) in zip(probe.rows, seen["first"][1::2], strict=True):
        close(row, *by_hand(x, y, config=ROUGH, samples=None)[:3])


def test_arm_looks_at_the_next_pass_only():
    model = Mlp()
    with GradientProbe(model, every=None, config=ROUGH) as probe:
        for step in range(4):
            if step == 2:
                probe.arm(117)
            model(torch.randn(40, 12)).sum().backward()
    assert [(row.step, row.module) for row in probe.rows] == [(117, "first"), (117, "second")]


def test_frozen_layers_and_sketched_ones_in_eval_mode_have_no_gradient():
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    convert(model, ROUGH)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    with GradientProbe(model, every=1) as probe:
        out = model[2](model[0](six_features()))
        model(six_features())
        (out + model[2](model[0](six_features()))).sum().backward()
    assert {row.module for row in probe.rows} == {"2"}


# Checkpointing


def rows_of(model, run, **options):
    with GradientProbe(model, every=1, **options) as probe:
        run(model)
    return probe.rows


@checkpoints
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_checkpointing_gives_the_same_numbers(reentrant, converted):
    batch, found = padded_batch(), []
    for enable in (False, True):
        model = tiny_model("roberta", dropout=0.0).train()
        if converted:
            convert(model, ROUGH)
        if enable:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        found.append(rows_of(model, lambda model: model(**batch).loss.backward(), config=ROUGH))
    assert len(found[0]) == 14
    same(*found)


@checkpoints
def test_under_checkpointing_x_is_held_in_the_recomputation_only(reentrant):
    model, alive = checkpointed(use_reentrant=reentrant, dropout=0.0), []
    model.block[2].register_forward_pre_hook(
        lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage()))
    )
    with GradientProbe(model, every=1, config=ROUGH) as probe:
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
        found.append(
            rows_of(Twice(region), lambda model: model(six_features()).square().sum().backward(), config=ROUGH)
        )
    assert len(found[0]) == 2
    assert values(found[0][0]) != pytest.approx(values(found[0][1]), rel=0.01)
    same(*found)


@checkpoints
@pytest.mark.parametrize("joint", [True, False], ids=["one backward", "two backwards"])
@pytest.mark.parametrize("looked_at", [1, 2])
def test_several_passes_wait_for_their_backward(reentrant, joint, looked_at):
    """Only one of them is looked at, and recomputations of the other are told from its own."""
    inputs, found = [six_features(), (3 * six_features().flip(0)).detach().requires_grad_()], []
    for mode in (None, reentrant):
        model = checkpointed(use_reentrant=mode, dropout=0.0)
        with GradientProbe(model, every=None, config=ROUGH) as probe:
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

    with GradientProbe(model, every=2, config=ROUGH) as probe:
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


# Training does not notice


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_weights_are_the_same_to_the_bit(reentrant, converted):
    found = []
    for every in (None, 1, 2):
        model = checkpointed(use_reentrant=reentrant)
        if converted:
            convert(model, memory=0.3, min_rows=1)  # bits="auto"
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(2)
        with GradientProbe(model, every=every, config=ROUGH) if every else nullcontext() as probe:
            for step in range(8):
                model(six_features() * (step + 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        if every:
            assert len(probe.rows) == 3 * 8 // every
        found.append(([p.detach().clone() for p in model.parameters()], torch.get_rng_state()))
    for weights, state in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(weights, found[0][0], strict=True))
        assert torch.equal(state, found[0][1])


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_a_models_weights_are_the_same_to_the_bit(converted):
    found = []
    for probed in (False, True):
        model = tiny_model("roberta").train()
        if converted:
            convert(model, memory=0.3, min_rows=1)
        torch.manual_seed(2)
        with GradientProbe(model, every=1, config=ROUGH) if probed else nullcontext():
            model(**padded_batch()).loss.backward()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_kept_bytes_do_not_change():
    model, batch = tiny_model("roberta").train(), padded_batch()
    convert(model, ROUGH)

    def kept():
        with track_saved(model) as ledger:
            loss = model(**batch).loss
        total = ledger.total
        loss.backward()
        return total

    torch.manual_seed(0)
    without = [kept() for _ in range(4)]
    torch.manual_seed(0)
    with GradientProbe(model, every=3) as probe:
        assert [kept() for _ in range(4)] == without
    assert {row.step for row in probe.rows} == {3}


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_x_lives_from_the_probe_steps_forward_to_its_backward(converted):
    """In a sketched layer nobody else holds X; between probes the probe does not either."""
    model, alive = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), []
    if converted:
        convert(model, ROUGH)
    model[1].register_forward_pre_hook(lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage())))
    with GradientProbe(model, every=2, config=ROUGH) as probe:
        for step in (1, 2, 3):
            loss = model(six_features()).square().sum()
            assert alive[-1].expired() == (converted and step != 2)
            loss.backward()
            assert alive[-1].expired()
            assert not any(isinstance(value, torch.Tensor) for row in probe.rows for value in vars(row).values())
    assert len(probe.rows) == 2


def test_no_hook_stays_between_probes_but_one_on_the_model():
    model = Mlp()
    before = snapshot(model)
    with GradientProbe(model, every=2, config=ROUGH):
        for _ in range(3):  # the hooks of a probe step go when the next pass begins
            model(torch.randn(40, 12)).sum().backward()
        inside = snapshot(model)
    assert [entry[3:] for entry in inside] == [(0, 1), *[(0, 0)] * 3]
    assert snapshot(model) == before


# Steps that go wrong


def test_a_step_without_backward_leaves_nothing():
    model, alive = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), []
    convert(model, ROUGH)
    model[1].register_forward_pre_hook(lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage())))
    with GradientProbe(model, every=1) as probe:
        loss = model(six_features()).sum()
        del loss
        gc.collect()
        assert alive[0].expired()
        model(six_features()).sum().backward()
    assert {row.step for row in probe.rows} == {2}


def test_an_exception_inside_forward_is_passed_on():
    model = Mlp()
    before = snapshot(model)
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(40, 13))
        model(torch.randn(40, 12)).sum().backward()
    assert [row.step for row in probe.rows] == [2, 2]
    assert snapshot(model) == before


def test_a_probe_that_was_left_looks_no_more_and_lets_go():
    model, alive = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), []
    convert(model, ROUGH)
    before = snapshot(model)
    handle = model[1].register_forward_pre_hook(
        lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage()))
    )
    with GradientProbe(model, every=1) as probe:
        loss = model(six_features()).sum()
    handle.remove()
    assert snapshot(model) == before
    assert alive[0].expired()
    loss.backward()
    assert probe.rows == []


def test_two_probes_at_once_see_the_same():
    model = Mlp()
    before = snapshot(model)
    with GradientProbe(model, every=1, config=ROUGH) as outer:
        with GradientProbe(model, every=2, config=ROUGH) as inner:
            for _ in range(2):
                model(torch.randn(40, 12)).square().sum().backward()
        model(torch.randn(40, 12)).square().sum().backward()
    assert snapshot(model) == before
    assert inner.rows == [row for row in outer.rows if row.step == 2]
    assert [row.step for row in outer.rows] == [1, 1, 2, 2, 3, 3]


def test_a_probe_is_entered_once_at_a_time():
    probe = GradientProbe(Mlp())
    with pytest.raises(RuntimeError, match="entered once at a time"), probe, probe:
        pass
    with probe:  # and can be entered again afterwards
        probe.model(torch.randn(4, 12))
    assert probe.passes == 1


def test_a_graph_that_is_walked_twice_is_measured_once():
    model = Mlp()
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        loss = model(torch.randn(40, 12)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(probe.rows) == 2


def test_an_input_that_is_overwritten_is_reported(caplog):
    """A sketched layer does not mind, but the probe would compute with another X."""
    model = nn.Sequential(nn.Linear(6, 6))
    convert(model, ROUGH)
    with GradientProbe(model, every=1) as probe:
        x = six_features().detach()
        loss = model(x).sum()
        x.add_(1)
        loss.backward()
    assert probe.rows == []
    assert "0: its input was overwritten" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("bits", [None, 4])
def test_what_is_not_finite_has_no_noise_and_raises_nothing(value, bits):
    model, x = Mlp(), torch.randn(40, 12)
    x[3, 4] = value
    config = ROUGH.replace(bits=bits)
    with GradientProbe(model, every=1, config=config) as probe:
        model(x).sum().backward()
    assert len(probe.rows) == 2
    assert all(math.isnan(number) for row in probe.rows for number in values(row))


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_alpha_is_exact_to_float32_whatever_the_scale(scale):
    x, y = heavy_tailed(300, 40, 30, torch.float32)
    alpha = by_hand(x, y, config=ROUGH, samples=None)[0]
    found = noise(scale * x, scale * y, None, None, None)[0]
    assert found == pytest.approx(alpha, rel=1e-6)


def test_a_gradient_of_zeros_has_no_noise():
    model = Mlp()
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        (0 * model(torch.randn(40, 12)).sum()).backward()
    assert [(row.sgd_variance, row.sketch_variance) for row in probe.rows] == [(0, 0), (0, 0)]
    assert all(math.isnan(row.noise) and math.isnan(row.alpha) for row in probe.rows)


@pytest.mark.parametrize("shape", [(0, 12), (1, 12), (1, 1, 12), (3, 0, 12), (12,)])
def test_odd_shapes(shape):
    model = Mlp()
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        model(torch.randn(shape)).sum().backward()
    assert [row.tokens for row in probe.rows] == [torch.Size(shape[:-1]).numel()] * 2
    assert all(math.isnan(row.noise) for row in probe.rows)  # no two samples


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model = Mlp().to(dtype)
    x = torch.randn(40, 12, dtype=dtype)
    with GradientProbe(model, every=1, config=ROUGH, modules=["first"]) as probe:
        seen = recorded(model, lambda: model(x).square().sum().backward())
    ((x, y),) = seen["first"]
    assert probe.rows[0].bits == 8 * dtype.itemsize
    close(probe.rows[0], *by_hand(x, y, config=ROUGH, samples=None)[:3])


# Which layers


def test_modules_are_matched_as_target_modules_are():
    model = tiny_model("roberta")
    convert(model, ROUGH, target_modules=["query", "output.dense"])
    chosen = {
        None: 2 + 4,
        "all-linear": 14,
        r".*\.layer\.0\..*": 6,
        ("dense",): 2 * 3 + 1,
        ("attention.output.dense",): 2,
    }
    for modules, count in chosen.items():
        probe = GradientProbe(model, modules=list(modules) if isinstance(modules, tuple) else modules)
        assert len(probe._modules) == count, modules


def test_without_modules_a_plain_model_is_probed_where_the_config_would_convert():
    model = tiny_model("gpt2")
    assert set(GradientProbe(model)._modules) == set(convert(model, dry_run=True).converted)
    config = RMMConfig(target_modules=["c_fc"])
    assert set(GradientProbe(model, config=config)._modules) == {f"transformer.h.{i}.mlp.c_fc" for i in range(2)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 2.5}, TypeError, "every must be a positive integer or None, got 2.5"),
        ({"config": {"ratio": 0.1}}, TypeError, "config must be an RMMConfig or None, got dict"),
        ({"modules": ["frist"]}, ValueError, "got \\('frist',\\), which matches none. The nearest layers are first"),
        ({"modules": []}, ValueError, "must name at least one layer"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    model = Mlp()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        GradientProbe(model, **options)
    assert snapshot(model) == before


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="needs a model with linear layers, got Tanh without any"):
        GradientProbe(nn.Tanh())


def test_a_probe_that_saw_nothing_says_so(caplog):
    inner = Mlp()
    wrapper = nn.Sequential(inner)
    with GradientProbe(wrapper):
        inner(torch.randn(40, 12)).sum().backward()
    assert "saw no forward pass of Sequential in training mode" in caplog.text


# Results


def two_steps():
    model = Checkpointed(dropout=0.0)
    with GradientProbe(model, every=1, config=ROUGH) as probe:
        for _ in range(2):
            model(torch.randn(30, 6)).square().sum().backward()
    return probe


def test_csv_and_dataframe_hold_the_rows(tmp_path):
    probe = two_steps()
    path = tmp_path / "variance.csv"
    probe.to_csv(path)
    frame = probe.to_dataframe()
    assert tuple(frame.columns) == COLUMNS
    assert (
        *("step", "module", "kind", "rows", "bits", "tokens"),
        *("alpha", "sgd_variance", "sketch_variance", "noise"),
    ) == COLUMNS
    pd.testing.assert_frame_equal(pd.read_csv(path, float_precision="round_trip"), frame, check_exact=True)
    assert [ProbeRow(**row) for row in frame.to_dict("records")] == probe.rows
    assert [row.step for row in probe.rows] == [1, 1, 1, 2, 2, 2]
    assert [row.module for row in probe.rows] == ["block.0", "block.2", "head"] * 2


def test_an_empty_csv_has_its_header(tmp_path):
    ProbeResults().to_csv(tmp_path / "variance.csv")
    assert (tmp_path / "variance.csv").read_text() == ",".join(COLUMNS) + "\n"
    assert list(ProbeResults().to_dataframe().columns) == list(COLUMNS)


def make_rows(noises, module="layer.{}.dense"):
    return [
        ProbeRow(step, module.format(step), "rows", 4, 32, 40, 0.01 * step, 1.0, noise, noise)
        for step, noise in enumerate(noises, start=1)
    ]


def test_summary_has_median_and_quartiles_per_sort_of_module_and_over_all():
    results = ProbeResults()
    results.rows = [*make_rows([1.0, 2.0, 3.0, 4.0, 5.0]), *make_rows([10.0, math.nan], "head.{}")]
    lines = results.summary().splitlines()
    text = {
        line.split()[1] if "│" in line else line.split()[0]: line for line in lines if "(" in line or "none" in line
    }
    assert "5" in text["layer.*.dense"]
    assert "3 (2 to 4)" in text["layer.*.dense"]
    assert "0.03 (0.02 to 0.04)" in text["layer.*.dense"]
    assert "10 (10 to 10)" in text["head.*"]
    assert "3.5 (2.25 to 4.75)" in text["all"]


def test_summary_of_nothing_and_of_infinities():
    assert "none" in ProbeResults().summary()
    results = ProbeResults()
    results.rows = make_rows([1.0, math.inf, math.inf])
    assert "inf" in results.summary()
    assert "nan" not in results.summary()


def test_medians_leave_out_what_is_no_number():
    results = ProbeResults()
    results.rows = [row for noise in (1.0, math.nan, 3.0) for row in make_rows([noise])]
    assert results.medians(1) == {"noise": 2.0, "alpha": 0.01}
    assert results.medians(2) == {}


def test_pandas_is_imported_late_and_its_absence_explained(tmp_path):
    code = (
        "import sys\n"
        "import rmm_linear.variance as v, rmm_linear.integrations\n"
        "assert not {'pandas', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.modules['pandas'] = None\n"
        "try:\n"
        "    v.ProbeResults().to_dataframe()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "sys.modules['transformers'] = None\n"
        "try:\n"
        "    import rmm_linear.integrations.transformers\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert "to_dataframe needs pandas" in first
    assert "pip install 'rmm_linear[glue]'" in first
    assert "pip install 'rmm_linear[glue]'" in second

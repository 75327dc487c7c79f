"""GradientProbe: its numbers are those of the closed forms on the X and Y of the step."""

import math

import pytest
import torch
from cases import CONFIG
from helpers import Mlp, six_features, tiny_model
from probe_helpers import by_hand, close, padded_batch, probed, recorded, same
from torch import nn

from rmm_linear import RMMConfig, RMMLinear, convert
from rmm_linear.ops.save import save_input
from rmm_linear.sketches import SAMPLERS, probabilities, row_norms
from rmm_linear.variance import GradientProbe, sgd_variance, sketch_variance


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
@pytest.mark.parametrize(
    ("config", "bits"),
    [
        (CONFIG, None),
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
            assert row.rows == config.spec(4, 16, 4).rows
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

    def look(x, spec, mask, seed, expected, basis):
        drawn[x.data_ptr()] = probabilities(row_norms(x), spec.uniform_mix, expected, mask)
        assert expected is not None
        return save_input(x, spec, mask, seed, expected, basis)

    monkeypatch.setattr("rmm_linear.layers.function.save_input", look)
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
        assert not math.isclose(row.sketch_variance, float(sketch_variance(x, y, **shape)), rel_tol=1e-5)


def test_a_layer_that_sees_few_rows_adds_no_noise():
    model = Mlp()
    convert(model, ratio=0.1, min_rows=64)
    with GradientProbe(model, every=1) as probe:
        model(torch.randn(50, 12)).square().sum().backward()
    assert [(row.rows, row.tokens, row.sketch_variance, row.noise) for row in probe.rows] == [(50, 50, 0.0, 0.0)] * 2
    assert all(row.sgd_variance > 0 for row in probe.rows)


@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize(
    ("fields", "bits", "rows"), [({}, 3, 300), ({"memory": 0.15}, 4, 300), ({"memory": 0.05}, 3, 153)]
)
def test_the_code_is_that_of_the_configuration(fields, bits, rows, is_converted):
    """Of 300 rows of 256 bytes: 4 bits take 33 of 38, and a sketch of half in 3 bits (25 bytes) is left for 12.8."""
    model, config = nn.Sequential(nn.Linear(64, 8)), RMMConfig(min_rows=1, **fields)
    if is_converted:
        convert(model, config)
    with GradientProbe(model, config=None if is_converted else config, every=1) as probe:
        model(torch.randn(300, 64)).square().sum().backward()
    assert [(row.bits, row.rows) for row in probe.rows] == [(bits, rows)]


def test_a_layer_that_is_exact_adds_no_noise():
    """As a code would free nothing there, or as the configuration leaves linear layers alone."""
    x = torch.randn(4, 100, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).train()
    context = convert(model, operations=["linear"]).context
    for _ in range(3):
        model(x).square().mean().backward()
    assert {context.names[index] for index in context.kept_anyway} == {"2"}
    with GradientProbe(model, every=1) as probe:
        model(x).square().mean().backward()
    assert {row.module: row.sketch_variance > 0 for row in probe.rows} == {"0": True, "2": False}
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).train()
    convert(model, operations=["activation"])
    for config, is_noisy in ((None, False), (RMMConfig(), True)):
        with GradientProbe(model, every=1, config=config) as probe:
            model(x).square().mean().backward()
        assert [row.sketch_variance > 0 for row in probe.rows] == [is_noisy] * 2


@pytest.mark.parametrize(
    ("shape", "samples"), [((4, 10, 12), (4, 10)), ((40, 12), None), ((1, 40, 12), None), ((2, 4, 5, 12), (2, 20))]
)
def test_samples_are_sequences_where_the_shape_tells(shape, samples):
    model, x = Mlp(), torch.randn(shape)
    (row,), seen = probed(model, lambda: model(x).square().sum().backward(), modules=["first"], config=CONFIG)
    ((x, y),) = seen["first"]
    assert row.samples == ("tokens" if samples is None else "sequences")
    assert row.sgd_variance == pytest.approx(float(sgd_variance(x, y, samples=samples)), rel=1e-6)
    assert row.sgd_variance_tokens == pytest.approx(float(sgd_variance(x, y)), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_of_d2_sgd_are_those_that_are_no_padding(batch):
    """A batch of one sequence has no variance over sequences, and padding would add to that over tokens."""
    model, x, mask = Flattening(), 2 + torch.randn(batch, 10, 6), torch.ones(batch, 10)  # gradients that agree
    mask[:, 6:] = 0
    (row,), seen = probed(model, lambda: model(x, attention_mask=mask).square().sum().backward(), config=CONFIG)
    ((x, y),), real = seen["layer"], mask.flatten().bool()
    tokens = float(sgd_variance(x[real], y[real]))
    assert float(sgd_variance(x, y)) > 1.02 * tokens
    assert row.sgd_variance_tokens == pytest.approx(tokens, rel=1e-6)
    assert row.samples == ("tokens" if batch == 1 else "sequences")
    assert (row.sgd_variance == row.sgd_variance_tokens) == (batch == 1)


class Flattening(nn.Module):
    """Flattens its tokens before the layer, as some decoders do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, attention_mask):
        return self.layer(x.flatten(0, 1)).view(*x.shape[:2], 3) * attention_mask.unsqueeze(-1)


class Pooling(Flattening):
    """Gives its padding a gradient, so that no layer could use the mask."""

    def forward(self, x, attention_mask):
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "converted", "mask_padding"),
    [(Flattening, True, True), (Flattening, False, True), (Flattening, True, False), (Pooling, False, True)],
)
def test_the_attention_mask_tells_sequences_of_flattened_tokens(kind, converted, mask_padding):
    """Whether the sketch leaves padding out or not."""
    model, x, mask = kind(), torch.randn(4, 10, 6), torch.ones(4, 10)
    mask[1:, 6:] = 0
    config = CONFIG.replace(mask_padding=mask_padding)
    if converted:
        convert(model, config)
    run = lambda: model(x, attention_mask=mask).square().sum().backward()  # noqa: E731
    (row,), seen = probed(model, run, config=None if converted else config)
    left_out = mask.flatten() if mask_padding and kind is Flattening else None
    close(row, *by_hand(*seen["layer"][0], config=config, samples=(4, 10), mask=left_out)[:3])
    assert row.samples == "sequences"


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_other_architectures(architecture):
    """GPT-2's Conv1D has a transposed weight; decoders make a 4-dimensional mask inside."""
    model, batch = tiny_model(architecture, dropout=0.0), padded_batch()
    batch["labels"] = (
        batch["labels"]
        if architecture == "bert"
        else batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    )
    convert(model, CONFIG)
    model.train()
    rows, seen = probed(model, lambda: model(**batch).loss.backward())
    layers = [row for row in rows if row.tokens == 80]
    assert len(layers) >= 8
    for row in layers:
        ((x, y),) = seen[row.module]
        mask = batch["attention_mask"].flatten()
        alpha, sgd, sketched, rows = by_hand(x, y, config=CONFIG, samples=(4, 20), mask=mask)
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
    rows, seen = probed(model, lambda: model(six_features()).square().sum().backward(), config=CONFIG)
    assert len(rows) == 2
    for row, (x, y) in zip(rows, seen["0"], strict=True):
        close(row, *by_hand(x, y, config=CONFIG, samples=None)[:3])


@pytest.mark.parametrize("converted", [True, False])
def test_an_activation_in_place_behind_the_layer(converted):
    rows = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))
        if converted:
            convert(model, CONFIG)
        with GradientProbe(model, every=1, config=CONFIG) as probe:
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
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        model(x).sum().backward()
    y = torch.full((40, 4), 3.0)
    close(probe.rows[0], *by_hand(2 * x, y, config=CONFIG, samples=None)[:3])

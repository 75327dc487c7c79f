"""Methods of the comparison: rivals save what they say and err as they say, exact ones are exact."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import bytes_kept, gradients, tiny_model
from statistical import assert_unbiased
from torch import nn

from benchmarks.frontier.few_bits import FewBitGELU, best_steps, gelu_steps, pack_codes, unpack_codes, use_few_bits
from benchmarks.frontier.gact import use_gact
from benchmarks.frontier.methods import METHODS, TUNED
from benchmarks.paper import PaperLinear
from rmm_linear import RMMLinear
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.packing.pack import packed_bytes


def spread(parts: list[np.ndarray]) -> float:
    return sum(float(((part - part.mean()) ** 2).sum()) for part in parts)


def test_no_other_cuts_are_closer() -> None:
    values = np.random.default_rng(0).normal(size=12).cumsum()
    found = best_steps(values, 4)
    every = [spread(np.split(values, cuts)) for cuts in itertools.combinations(range(1, 12), 3)]
    assert spread(np.split(values, found)) == pytest.approx(min(every))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 8, 21])
def test_codes_come_back(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    stored = pack_codes(codes, bits)
    assert stored.nbytes == -(-count // 8) * bits
    assert torch.equal(unpack_codes(stored, bits, count), codes)


def test_a_derivative_of_few_bits_is_the_value_of_its_piece() -> None:
    module, exact = FewBitGELU(3), nn.GELU()
    x = torch.linspace(-4, 4, 999).view(3, 333)
    inputs, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    output = module(inputs)
    assert torch.equal(output, exact(expected))
    output.sum().backward()
    exact(expected).sum().backward()
    borders, levels = gelu_steps(3)
    assert (borders.diff() > 0).all()
    assert inputs.grad is not None
    assert expected.grad is not None
    pieces = (x[..., None] > borders).sum(-1)
    assert torch.equal(inputs.grad, levels[pieces])
    # Eight pieces between the least and the greatest of g', -0.13 and 1.13: no further off than a piece is high.
    assert (inputs.grad - expected.grad).abs().max() < 1.26 / 4
    codes = bytes_kept(module, x.clone().requires_grad_())
    assert codes == 125 * 3  # the levels are a buffer


def test_activations_are_replaced_in_a_model_and_must_be_there() -> None:
    model = tiny_model("roberta")
    use_few_bits(model, 3)
    assert sum(isinstance(module, FewBitGELU) for module in model.modules()) == 2
    with pytest.raises(ValueError, match="needs a GELU"):
        use_few_bits(nn.Linear(2, 2), 3)


class Branches(nn.Module):
    """Two linear layers that read the same input, dropout, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.left(x) + self.right(x))


def branches() -> tuple[Branches, torch.Tensor]:
    torch.manual_seed(0)
    return Branches(), torch.randn(100, 64)


def test_gact_packs_once_what_is_saved_twice() -> None:
    model, x = branches()
    x.requires_grad_()
    use_gact(model, 4)
    with LiveTensors(Peak()) as live:
        before = live.now
        output = model(x)
        kept = live.now - before - output.nbytes
    assert kept == packed_bytes(100, 64, 4) + packed_bytes(50, 64, 4)


def test_gact_estimates_the_gradient_without_bias() -> None:
    model, x = branches()
    x.requires_grad_()
    model(x).square().sum().backward()
    exact, to_input = gradients(model), x.grad
    use_gact(model, 2)

    def draw(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        x.grad = None
        model(x).square().sum().backward()
        return gradients(model)

    assert not torch.equal(draw(0)["left.weight"], exact["left.weight"])
    assert x.grad is not None
    assert to_input is not None
    assert torch.equal(x.grad, to_input)
    weights = {name: value for name, value in exact.items() if name.startswith(("left.w", "right.w"))}
    assert_unbiased(lambda seed: {name: draw(seed)[name] for name in weights}, weights, draws=200, widest=0.02)


def test_gact_keeps_masks_of_dropout_in_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.25))
    x = torch.randn(40, 64, requires_grad=True)
    torch.manual_seed(1)
    model(x).sum().backward()
    exact = x.grad
    use_gact(model)
    x.grad = None
    torch.manual_seed(1)
    with LiveTensors(Peak()) as live:
        output = model(x)
        kept = live.now - output.nbytes
    assert kept == 40 * 64 // 8 + 4  # and the scale
    output.sum().backward()
    assert x.grad is not None
    assert exact is not None
    assert torch.equal(x.grad, exact)


def test_gact_packs_rows_of_any_width_in_full_groups() -> None:
    torch.manual_seed(0)
    module = nn.Sigmoid()
    x = torch.randn(30, 5, requires_grad=True)
    use_gact(module, 8)
    with LiveTensors(Peak()) as live:
        output = module(x)
        kept = live.now - output.nbytes
    assert kept == packed_bytes(3, 64, 8)
    output.sum().backward()
    exact = torch.sigmoid(x.detach())
    assert x.grad is not None
    # Values in (0, 1) are off by a half of 1/255 of the range of a group that was rotated, whose values are below 8.
    assert (x.grad - exact * (1 - exact)).abs().max() < 16 / 255 / 2
    assert not torch.equal(x.grad, exact * (1 - exact))


def large_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"input_ids": torch.randint(3, 64, (40, 20), generator=generator), "labels": torch.arange(40) % 2}


def trained(method: str, dropout: float = 0.0, width: int = 64, seed: int = 0) -> tuple[nn.Module, float, int]:
    """A model after one backward pass, its loss, and what lived between the passes."""
    how = METHODS[method]
    model = how.prepare(tiny_model("roberta", dropout=dropout, width=width).train())
    batch = large_batch()
    if how.is_indexed:
        batch["sample_index"] = torch.arange(40)
    torch.manual_seed(seed)
    with LiveTensors(Peak()) as live:
        loss = model(**batch).loss
        kept = live.now
    loss.backward()
    return model, float(loss.detach()), kept


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("method", "count"), [("checkpoint", 2), ("checkpoint-half", 1)])
def test_exact_methods_are_exact(method: str, count: int, dropout: float) -> None:
    assert METHODS[method].is_exact
    (exact, loss, whole), (model, other, kept) = trained("exact", dropout), trained(method, dropout)
    layers = [one for one in model.modules() if type(one).__name__ == "RobertaLayer"]
    assert sum(one.gradient_checkpointing for one in layers) == count
    assert kept < whole
    assert loss == other
    expected, found = gradients(exact), gradients(model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("method", [name for name, one in METHODS.items() if one.budget is None and not one.is_exact])
def test_every_other_method_keeps_less_and_errs(method: str) -> None:
    """The loss is the exact one; the gradient points the same way, and is another."""
    (exact, loss, whole), (model, other, kept) = trained("exact"), trained(method)
    assert other == pytest.approx(loss, rel=1e-5)
    found = gradients(model)
    if METHODS[method].group == "fewer parameters":
        adapters = [name for name in found if "lora_" in name]
        assert adapters
        assert all("lora_" in name or "classifier" in name for name in found)
        assert (model.peft_config["default"].velora_config is not None) == (method == "velora")
        # VeLoRA keeps 64 numbers of each row, of more than that.
        assert method == "lora" or trained(method, width=256)[2] < 0.95 * trained("lora", width=256)[2]
        return
    assert kept < whole
    expected = gradients(exact)
    assert expected.keys() == found.keys()
    name = "roberta.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(expected[name], found[name])
    # Along the exact one, its length is on average the exact one's: ten draws tell half or twice of it.
    lengths = [_length(gradients(trained(method, seed=seed)[0]), expected) for seed in range(1, 11)]
    error = statistics.stdev(lengths) / math.sqrt(len(lengths))
    assert error < 0.1
    assert statistics.mean(lengths) == pytest.approx(1, abs=4.3 * error + (0.1 if method == "few-bits" else 1e-3))


def _length(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    flat, right = (torch.cat([one[key].flatten() for key in expected]) for one in (found, expected))
    return float(flat @ right / (right @ right))


@pytest.mark.parametrize("method", [name for name in TUNED if METHODS[name].budget is None])
def test_all_methods_have_the_masks_of_dropout_that_the_exact_model_has(method: str) -> None:
    exact = [trained("exact", dropout=0.1, seed=seed)[1] for seed in (0, 1)]
    assert abs(exact[1] - exact[0]) > 1e-4
    # Outputs are the exact ones up to the order of sums: of eager attention, say.
    assert trained(method, dropout=0.1)[1] == pytest.approx(exact[0], abs=1e-5)


@pytest.mark.parametrize(("method", "share"), [("gaussian-50", 0.5), ("gaussian-20", 0.2), ("gaussian-10", 0.1)])
def test_gaussian_sketches_are_the_published_layers(method: str, share: float) -> None:
    model, _, kept = trained(method)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PaperLinear)}
    assert len(layers) == 12
    assert not any("classifier" in name for name in layers)
    assert {layer.ratio for layer in layers.values()} == {share}
    # Less is kept by what is left out of every layer's input: query, key and value keep one each.
    halved = trained("gaussian-50")[2]
    rows = 800 * sum(layer.in_features for layer in layers.values()) * 4
    assert halved - kept == pytest.approx((0.5 - share) * rows, rel=1e-3)


@pytest.mark.parametrize(("method", "share"), [("wta-30", 0.3), ("wta-10", 0.1)])
def test_selections_are_those_of_the_paper(method: str, share: float) -> None:
    model, _, _ = trained(method)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, RMMLinear)}
    assert len(layers) == 12
    assert not any("classifier" in name for name in layers)
    found = {(c.kind, c.ratio, c.bits, c.mask_padding, c.min_rows) for c in (one.rmm_config for one in layers.values())}
    assert found == {("wta", share, None, False, 1)}
    assert {one.rmm_config.norm_estimator for one in layers.values()} == {"sample_cache"}
    context = layers["roberta.encoder.layer.0.attention.self.query"].rmm_context
    assert context is not None
    assert not context.sketch_cache.groups  # query, key and value have a selection each


def test_settings_tell_methods_and_plans_apart(tmp_path: Path) -> None:
    ours = ("linears", "wide", "tenth", "narrow", "gaussian-50", "gaussian-10", "wta-30", "wta-10", "lora", "velora")
    assert len({METHODS[name].settings() for name in ours}) == len(ours)
    plan = tmp_path / "plan.json"
    plan.write_text("one")
    first = METHODS["fit-25"].settings(plan)
    plan.write_text("two")
    assert METHODS["fit-25"].settings(plan) != first


def test_plans_must_be_there() -> None:
    with pytest.raises(ValueError, match="needs a plan"):
        METHODS["fit-25"].prepare(nn.Linear(1, 1))

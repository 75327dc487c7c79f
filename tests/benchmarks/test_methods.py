"""Methods of the comparison: others save what they say and err as they say, exact ones are exact."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import gradients, tiny_model, token_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.frontier.few_bits import FewBitGELU, gelu_steps, pack_codes, unpack_codes, use_few_bits
from benchmarks.frontier.gact import use_gact
from benchmarks.frontier.methods import METHODS, TUNED
from benchmarks.suites.paper import PaperLinear, use_paper
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.packing.pack import packed_bytes


def test_a_derivative_of_few_bits_is_the_value_of_its_piece() -> None:
    for bits, count in itertools.product((1, 2, 3, 4), (1, 8, 21)):
        codes = torch.randint(0, 2**bits, (count,), dtype=torch.uint8)
        stored = pack_codes(codes, bits)
        assert stored.nbytes == -(-count // 8) * bits
        assert torch.equal(unpack_codes(stored, bits, count), codes)
    x = torch.linspace(-4, 4, 999).view(3, 333)
    inputs = x.clone().requires_grad_()
    output = FewBitGELU(3)(inputs)
    assert torch.equal(output, nn.GELU()(x))
    output.sum().backward()
    borders, levels = gelu_steps(3)
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, levels[(x[..., None] > borders).sum(-1)])
    with pytest.raises(ValueError, match="needs a GELU"):
        use_few_bits(nn.Linear(2, 2), 3)


def test_gact_packs_once_what_is_saved_twice() -> None:
    torch.manual_seed(0)
    layers, x = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)]), torch.randn(100, 64, requires_grad=True)
    layers.forward = lambda x: layers[0](x) + layers[1](x)  # pyright: ignore[reportAttributeAccessIssue]
    use_gact(layers, 2)
    with LiveTensors(Peak()) as live:
        output = layers(x)
        kept = live.now - output.nbytes
    assert kept == packed_bytes(100, 64, 2)


def test_the_published_layer_is_unbiased_under_checkpointing() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(16, 8)), torch.randn(64, 16), torch.randn(64, 8)
    exact = y.T @ x
    use_paper(model, 0.5)
    found, layer = [], model[0]
    assert isinstance(layer, PaperLinear)
    for _ in range(100):
        layer.weight.grad = None
        checkpoint(model, x, use_reentrant=False).backward(y)
        assert layer.weight.grad is not None
        found.append(float((layer.weight.grad * exact).sum() / exact.square().sum()))
    # With another step's S in the backward pass, it would be 0.
    assert statistics.mean(found) == pytest.approx(1, abs=4 * statistics.stdev(found) / 10)
    assert statistics.stdev(found) < 1


def trained(method: str, dropout: float = 0.0, seed: int = 0) -> tuple[nn.Module, float, int]:
    """A model after one backward pass, its loss, and what lived between the passes."""
    how = METHODS[method]
    model = how.prepare(tiny_model("roberta", dropout=dropout, width=64).train())
    ids = token_ids(40, 20)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(40) % 2}
    if how.is_indexed:
        batch["sample_index"] = torch.arange(40)
    torch.manual_seed(seed)
    with LiveTensors(Peak()) as live:
        loss = model(**batch).loss
        kept = live.now
    loss.backward()
    return model, float(loss.detach()), kept


@pytest.mark.parametrize(("method", "count"), [("checkpoint", 2), ("checkpoint-half", 1)])
def test_exact_methods_are_exact(method: str, count: int) -> None:
    (exact, loss, whole), (model, other, kept) = trained("exact", 0.1), trained(method, 0.1)
    layers = [one for one in model.modules() if type(one).__name__ == "RobertaLayer"]
    assert sum(one.gradient_checkpointing for one in layers) == count
    assert (loss, METHODS[method].is_exact) == (other, True)
    assert kept < whole
    expected, found = gradients(exact), gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def others() -> Iterator[Any]:
    """One of each kind, and those that differ in a number where tests are thorough."""
    seen: set[str] = set()
    for name, one in METHODS.items():
        if one.budget is None and not one.is_exact and not name.startswith("qlora"):  # it changes the loss
            kind = name.split("-")[0]
            yield pytest.param(name, marks=[pytest.mark.thorough] * (kind in seen))
            seen.add(kind)


@pytest.mark.parametrize("method", others())
def test_every_other_method_keeps_less_and_errs(method: str) -> None:
    """The loss is the exact one; the gradient points the same way, and is another."""
    (exact, loss, whole), (model, other, kept) = trained("exact"), trained(method)
    assert other == pytest.approx(loss, rel=1e-5)
    found = gradients(model)
    if METHODS[method].group == "fewer parameters":
        assert all("lora_" in name or "classifier" in name for name in found)
        assert (model.peft_config["default"].velora_config is not None) == (method == "velora")
        return
    assert kept < whole
    expected = gradients(exact)
    name = "roberta.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(expected[name], found[name])

    def length(found: dict[str, torch.Tensor]) -> float:
        flat, right = (torch.cat([one[key].flatten() for key in expected]) for one in (found, expected))
        return float(flat @ right / (right @ right))

    # Along the exact one, its length is on average the exact one's: five draws tell half or twice of it.
    lengths = [length(gradients(trained(method, seed=seed)[0])) for seed in range(1, 6)]
    error = statistics.stdev(lengths) / math.sqrt(len(lengths))
    assert error < 0.12
    assert statistics.mean(lengths) == pytest.approx(1, abs=7 * error + (0.1 if method == "few-bits" else 1e-3))


@pytest.mark.parametrize("method", [name for name in TUNED if METHODS[name].budget is None])
def test_all_methods_have_the_masks_of_dropout_that_the_exact_model_has(method: str) -> None:
    exact = [trained("exact", dropout=0.1, seed=seed)[1] for seed in (0, 1)]
    assert abs(exact[1] - exact[0]) > 1e-4
    # Outputs are the exact ones up to the order of sums: of eager attention, say.
    assert trained(method, dropout=0.1)[1] == pytest.approx(exact[0], abs=1e-5)

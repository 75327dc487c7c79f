"""Methods of the comparison: rivals save what they say and err as they say, exact ones are exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers import batch_of, bytes_kept, gradients, tiny_model
from statistical import assert_unbiased
from torch import nn

from benchmarks.frontier.few_bits import FewBitGELU, best_steps, gelu_steps, pack_codes, unpack_codes, use_few_bits
from benchmarks.frontier.gact import use_gact
from benchmarks.frontier.methods import METHODS
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
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(0))
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
    assert kept == packed_bytes(100, 64, 4) + packed_bytes(100, 32, 4)


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


@pytest.mark.parametrize("method", ["checkpoint", "checkpoint-half"])
def test_exact_methods_are_exact(method: str) -> None:
    assert METHODS[method].is_exact
    found = []
    for name in ("exact", method):
        model = METHODS[name].prepare(tiny_model("roberta").train())
        torch.manual_seed(0)
        output = model(**batch_of("roberta"))
        output.logits.square().mean().backward()
        found.append((gradients(model), sum(getattr(one, "gradient_checkpointing", False) for one in model.modules())))
    (exact, _), (other, count) = found
    assert exact.keys() == other.keys()
    assert all(torch.equal(exact[name], other[name]) for name in exact)
    assert count


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.budget is None])
def test_every_method_trains(method: str) -> None:
    how = METHODS[method]
    model = how.prepare(tiny_model("roberta").train())
    batch = batch_of("roberta") | {"labels": torch.tensor([0, 1, 0, 1])}
    if how.is_indexed:
        batch["sample_index"] = torch.arange(4)
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in trained)
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in trained)


def test_plans_must_be_there() -> None:
    with pytest.raises(ValueError, match="needs a plan"):
        METHODS["fit-25"].planned(None)

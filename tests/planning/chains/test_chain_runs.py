"""Running a chain by a plan: same results, and the memory that the plan says."""

import pytest
import torch
from torch import nn

from rmm_linear.memory import peak
from rmm_linear.planning import ChainPlan, chain_sizes, checkpoint_chain, minimum_peak


def chain(dropout=0.2):
    torch.manual_seed(0)
    layers = [
        part
        for width, out in zip((8, 32, 4, 64, 16, 8, 48, 8), (32, 4, 64, 16, 8, 48, 8, 4), strict=True)
        for part in (nn.Linear(width, out), nn.Tanh(), nn.BatchNorm1d(out), nn.Dropout(dropout))
    ]
    return nn.Sequential(*layers)


def outcome(modules, x, plan=None):
    """Output, gradients, buffers and the generator's state after one training step."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    output = modules(x) if plan is None else checkpoint_chain(modules, x, plan)
    output.square().sum().backward()
    return [output, x.grad, *(p.grad for p in modules.parameters()), *modules.buffers(), torch.get_rng_state()]


def test_sizes_are_bytes_of_input_and_outputs_and_measuring_leaves_no_trace():
    modules, x = chain(), torch.randn(16, 8)
    before, generator = [buffer.clone() for buffer in modules.buffers()], torch.get_rng_state()
    sizes = chain_sizes(modules, x)
    assert sizes[:6] == [16 * width * 4 for width in (8, 32, 32, 32, 32, 4)]
    assert len(sizes) == len(modules) + 1
    assert chain_sizes([nn.Flatten()], x) == [16 * 8 * 4, 0]
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(old, new) for old, new in zip(before, modules.buffers(), strict=True))


@pytest.mark.parametrize("widths", [[1] * 60, [1, 9, 2, 2, 7] * 12])
def test_the_measured_peak_is_the_predicted_one(widths):
    """Each module saves its result alone. What is measured begins with the chain's input, which is there before, so it
    counts less by that; the gradient of the last output and one result in the making come on top."""

    class Widen(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.width = width

        def forward(self, x):
            return x[:, :1].expand(-1, self.width).sigmoid()

    modules, unit = [Widen(256 * width) for width in widths], 256 * 4 * 8
    x = torch.randn(8, 256, requires_grad=True)
    plan = minimum_peak(chain_sizes(modules, x))
    with peak("cpu") as measured:
        checkpoint_chain(modules, x, plan).sum().backward()
    with peak("cpu") as plain:
        checkpoint_chain(modules, x, ChainPlan(0, tuple(range(len(modules) + 1)))).sum().backward()
    assert plan.peak - unit <= measured.bytes <= plan.peak + 2 * max(widths) * unit
    assert measured.bytes < 0.5 * plain.bytes


def test_without_gradients_the_modules_run():
    modules, x = chain().eval(), torch.randn(16, 8)
    with torch.no_grad():
        found = checkpoint_chain(list(modules), x, minimum_peak([1] * (len(modules) + 1)))
    assert torch.equal(found, modules(x))
    assert not found.requires_grad


def test_a_plan_of_another_chain_is_refused():
    with pytest.raises(ValueError, match=r"one of 33 sizes, .* got one of 5\. Use minimum_peak\(chain_sizes"):
        checkpoint_chain(chain(), torch.randn(4, 8), minimum_peak([1] * 5))
    with pytest.raises(ValueError, match="at least one module"):
        chain_sizes([], torch.ones(1))


def test_a_segment_that_changes_its_input_in_place_is_refused():
    modules, x = [nn.Linear(8, 8), nn.SELU(inplace=True), nn.Tanh(), nn.Linear(8, 4)], torch.randn(16, 8)
    with pytest.raises(ValueError, match=r"leave their input as it was, got SELU, Tanh, .* inplace=False"):
        checkpoint_chain(modules, x, ChainPlan(0, (0, 1, 3, 4)))
    plain = nn.Sequential(*modules)
    for plan in (ChainPlan(0, (0, 1, 2, 4)), ChainPlan(0, (0, 2, 4))):
        plain.zero_grad()
        expected = [one.clone() for one in outcome(plain, x)]
        plain.zero_grad()
        assert all(torch.equal(old, new) for old, new in zip(expected, outcome(plain, x, plan), strict=True))

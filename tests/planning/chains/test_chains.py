"""checkpoint_chain: the outputs with the least peak, the memory that the plan says, and what is refused.

That a chain gives the same results is in contracts/test_replay.py.
"""

import random
import time
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from rmm_linear.memory import peak
from rmm_linear.planning import ChainPlan, chain_sizes, checkpoint_chain, minimum_peak


def peak_of(sizes, kept):
    """The peak of a subset, from the definition."""
    total, peak = 0, 0
    for i, j in pairwise(kept):
        total += sizes[i]
        peak = max(peak, total + sum(sizes[i + 1 : j]) + max(sizes[i:j]) + sizes[j])
    return max(peak, total + sizes[kept[-1]])


def best_of_all(sizes):
    """The least peak over every subset."""
    last = len(sizes) - 1
    inner = range(1, last)
    subsets = (chosen for count in range(len(inner) + 1) for chosen in combinations(inner, count))
    return min(peak_of(sizes, sorted({0, last, *chosen})) for chosen in subsets)


def quadratic(sizes):
    """The least peak by the recurrence as it stands, in O(n²)."""
    best = [0] * len(sizes)
    best[-1] = sizes[-1]
    for i in range(len(sizes) - 2, -1, -1):
        inside, top, least = 0, sizes[i], float("inf")
        for j in range(i + 1, len(sizes)):
            least = min(least, max(best[j], inside + top + sizes[j]))
            inside, top = inside + sizes[j], max(top, sizes[j])
        best[i] = sizes[i] + least
    return best[0]


def chains(count, longest, seed=0):
    """Chains with few and many ties, zeros and outliers among their sizes."""
    draw = random.Random(seed)
    for _ in range(count):
        length, top = draw.randint(1, longest), draw.choice([1, 3, 10, 1000, 10**12])
        few = draw.random() < 0.3
        yield [draw.choice([0, 1, 100]) if few else draw.randint(0, top) for _ in range(length)]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.montecarlo)])
def test_no_subset_has_a_lower_peak_and_the_one_returned_has_it(times):
    """Short chains against every subset, long ones against the recurrence."""
    for count, longest, least in ((400, 12, best_of_all), (20, 400, quadratic)):
        for sizes in chains(times * count, longest):
            plan = minimum_peak(sizes)
            assert plan.peak == least(sizes) == peak_of(sizes, plan.kept), sizes


def test_a_million_outputs_take_seconds():
    draw = random.Random(0)
    sizes = [draw.randint(1, 10**6) for _ in range(10**6)]
    begin = time.process_time()
    plan = minimum_peak(sizes)
    assert time.process_time() - begin < 10
    assert plan.peak == peak_of(sizes, plan.kept)


@pytest.mark.parametrize("length", [100, 1000, 10_000])
def test_equal_outputs_need_about_the_root_of_twice_their_number(length):
    """With s segments of falling length s, s - 1, …, the stored ones and the inside of a segment always sum up to s."""
    segments = next(s for s in range(length) if s * (s + 1) // 2 >= length)
    assert segments <= minimum_peak([1] * length).peak <= segments + 3


@pytest.mark.parametrize(("sizes", "peak", "last"), [([7], 7, 0), ([7, 2], 16, 1), ([0, 0, 0], 0, 2)])
def test_the_shortest_chains(sizes, peak, last):
    plan = minimum_peak(sizes)
    assert (plan.peak, plan.kept[0], plan.kept[-1]) == (peak, 0, last)


def test_a_plan_is_data(tmp_path):
    plan = minimum_peak(range(50))
    plan.save(tmp_path / "plan.json")
    assert ChainPlan.load(tmp_path / "plan.json") == plan
    assert f"{plan.peak:,} bytes" in str(plan)


def test_sizes_are_bytes_of_input_and_outputs_and_measuring_leaves_no_trace():
    modules, x = (
        nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4)),
        torch.ones(16, 8),
    )
    before, generator = [buffer.clone() for buffer in modules.buffers()], torch.get_rng_state()
    assert chain_sizes(modules, x) == [16 * width * 4 for width in (8, 32, 32, 32, 4)]
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
    modules, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(16, 8)
    with torch.no_grad():
        found = checkpoint_chain(list(modules), x, minimum_peak([1] * 4))
    assert torch.equal(found, modules(x))
    assert not found.requires_grad


def test_a_segment_that_changes_its_input_in_place_is_refused():
    modules, x = [nn.Linear(8, 8), nn.SELU(inplace=True), nn.Tanh(), nn.Linear(8, 4)], torch.randn(16, 8)
    with pytest.raises(ValueError, match=r"leave their input as it was, got SELU, Tanh, .* inplace=False"):
        checkpoint_chain(modules, x, ChainPlan(0, (0, 1, 3, 4)))
    weight = modules[0].weight
    (expected,) = torch.autograd.grad(nn.Sequential(*modules)(x).sum(), weight)
    for kept in ((0, 1, 2, 4), (0, 2, 4)):
        (found,) = torch.autograd.grad(checkpoint_chain(modules, x, ChainPlan(0, kept)).sum(), weight)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: minimum_peak([]), ValueError, "at least one output, got none"),
        (lambda: minimum_peak([3, -1]), ValueError, "must not be negative, got -1 at 1"),
        (lambda: minimum_peak([3, 1.5]), TypeError, r"must be integers, got 1\.5 at 1"),
        (lambda: ChainPlan(3, ()), ValueError, "kept must begin with 0 and rise"),
        (lambda: ChainPlan(3, (1, 2)), ValueError, "kept must begin with 0 and rise"),
        (lambda: ChainPlan(3, (0, 2, 2)), ValueError, "kept must begin with 0 and rise"),
        (lambda: chain_sizes([], torch.ones(1)), ValueError, "at least one module"),
        (
            lambda: checkpoint_chain([nn.Tanh()], torch.ones(4, 8), minimum_peak([1] * 5)),
            ValueError,
            r"one of 2 sizes, .* got one of 5\. Use minimum_peak\(chain_sizes",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()

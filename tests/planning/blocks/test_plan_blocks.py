"""Planned blocks: within the budget, predicted to the byte, and the same gradients and buffers to the bit.

contracts/test_replay.py has what may go wrong in a block, with every choice.
"""

import copy
import gc
import pickle
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from planning_graph_helpers import NETWORKS, gradients, network, real_peak, same
from torch import nn

import rmm_linear
from rmm_linear import RMMConfig
from rmm_linear.planning import BlockPlan, PlannedBlock, plan_blocks, simulate
from rmm_linear.planning.blocks.find import find_blocks
from rmm_linear.planning.blocks.recompute import Recomputed
from rmm_linear.planning.replay import replayed
from rmm_linear.planning.step.step import run_step

SHARES = {"mlp": 0.6, "roberta": 0.6, "llama": 0.6, "cnn": 0.6, "unet": 0.75}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in ("roberta", "unet", "cnn"))) for name in NETWORKS],
)
def test_a_planned_step_fits_and_changes_no_bit(name):
    model, example = network(name)
    expected = gradients(model, lambda: run_step(model, example), restore=True)
    plan = plan_blocks(model, example, memory=SHARES[name])
    assert plan.predicted <= plan.memory == int(SHARES[name] * plan.plain)
    assert any(block.choice != "keep" for block in plan.blocks)
    assert plan.apply() is model
    assert same(gradients(model, lambda: run_step(model, example), restore=True), expected)
    gc.collect()
    assert real_peak(model, example) == plan.predicted
    plan.revert()
    assert simulate(model, example).bytes == plan.plain


def test_planned_models_are_copied_and_pickled():
    model, example = network("mlp")
    plan = plan_blocks(model, example, memory=0.6)
    plan.apply()
    expected = gradients(model, lambda: run_step(model, example))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(gradients(other, lambda other=other: run_step(other, example)), expected)
        assert simulate(other, example).bytes == plan.predicted


class _Drawing(nn.Module):
    """Draws from generators of the CPU and of a device, from Python's and NumPy's."""

    def __init__(self, device):
        super().__init__()
        self.linear, self.device = nn.Linear(64, 64), device

    def forward(self, hidden):
        mask = torch.rand(hidden.shape, generator=self.device) < 0.5
        scale = random.random() + numpy.random.rand()  # noqa: NPY002
        return scale * self.linear(nn.functional.dropout(hidden * mask, 0.2)).tanh()


@pytest.mark.parametrize("is_keyword", [False, True])
def test_a_block_draws_the_same_numbers_again(is_keyword, monkeypatch):
    """A generator stands for a device's, whose tensors come by keyword too, as those of attention do."""
    device = torch.Generator()
    module = SimpleNamespace(
        get_rng_state=lambda _: device.get_state(), set_rng_state=lambda state, _: device.set_state(state)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(replayed, "accelerators", lambda leaves: [torch.device("cuda")] if [*leaves] else [])
    model, x = _Drawing(device), torch.randn(100, 64)

    def step():
        for seed in (torch.manual_seed, random.seed, numpy.random.seed, device.manual_seed):
            seed(1)
        model.zero_grad()
        (model(hidden=x) if is_keyword else model(x)).sum().backward()
        of_torch = [float(torch.rand((), generator=one)) for one in (None, device)]
        drawn = random.random(), numpy.random.rand(), of_torch  # noqa: NPY002
        return model.linear.weight.grad.clone(), drawn

    expected, drawn = step()
    Recomputed(model).attach()
    for _ in range(2):
        found, after = step()
        assert torch.equal(found, expected)
        assert after == drawn


class _Masked(nn.Module):
    """Reads a mask that is as large as what it saves, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("mask", torch.ones(512, 512, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        self.calls.add_(1)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (self.linear(x) * self.mask[: len(x), :64]).tanh()


def test_masks_are_not_copied_and_their_change_is_an_error():
    model, x = nn.Sequential(*(_Masked() for _ in range(4))), torch.randn(64, 64)
    expected = gradients(model, lambda: run_step(model, x), restore=True)
    plain = simulate(model, x).bytes
    plan = BlockPlan([PlannedBlock(str(number), "recompute") for number in range(4)])
    with plan.applied(model):
        assert same(gradients(model, lambda: run_step(model, x), restore=True), expected)
        assert simulate(model, x).bytes == real_peak(model, x) < plain + 512 * 512  # one copy, while a block runs first
        mask, output = model[0].mask, model(x).sum()
        model[0].mask = torch.zeros_like(mask)  # another tensor: the repetition reads the one that was there
        output.backward()
        found = {f"{name}.grad": one.grad for name, one in model.named_parameters()}
        assert all(torch.equal(found[f"{name}.grad"], expected[name]) for name, _ in model.named_parameters())
        model[0].mask = mask
        output = model(x).sum()
        mask.fill_(False)
        with pytest.raises(RuntimeError, match=r"a buffer of shape \(512, 512\) was changed in place"):
            output.backward()


@pytest.mark.parametrize("choice", ["recompute", "selective", "attention", "nested"])
def test_every_recomputation_is_pickled(choice):
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), torch.randn(4, 8)
    expected = gradients(model, lambda: run_step(model, x))
    with BlockPlan([PlannedBlock("0", choice)]).applied(model):
        other = pickle.loads(pickle.dumps(model))
    assert isinstance(vars(other[0])["forward"], Recomputed)
    assert same(gradients(other, lambda: run_step(other, x)), expected)


def test_a_plain_step_that_fits_stays():
    model, example = network("mlp")
    plan = plan_blocks(model, example, memory="1GB")
    assert {block.choice for block in plan.blocks} == {"keep"}
    assert (plan.predicted, plan.flops) == (plan.plain, 1.0)


def test_what_cannot_fit_says_the_least_and_what_binds():
    model, example = network("mlp")
    with pytest.raises(ValueError, match=r"the least is \d+ bytes .* of \d") as raised:
        plan_blocks(model, example, memory=0.05)
    least = int(str(raised.value).split("the least is ")[1].split()[0])
    assert plan_blocks(model, example, memory=least).predicted <= least


class Overwriting(nn.Module):
    """Changes what it is given."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.mul_(2))


def test_a_block_that_overwrites_its_input_is_not_recomputed_and_the_batch_stays():
    model, x = nn.Sequential(nn.Linear(8, 8), *(Overwriting() for _ in range(4))), torch.randn(500, 8)
    costs = rmm_linear.planning.measure(model, x)
    assert [block.writes_input for block in costs.blocks] == [False, True, True, True, True]
    with pytest.raises(ValueError, match="cannot be met"):
        plan_blocks(model, x, memory=0.3)
    model[0] = nn.Sequential(Overwriting(), nn.BatchNorm1d(8).eval())
    before = x.clone()
    plan_blocks(model, x, memory=1.0)
    assert torch.equal(x, before)
    assert not model[0][1].training


def test_a_converted_model_keeps_its_sketches():
    model, example = network("roberta")
    example = {name: torch.cat([value] * 8) for name, value in example.items()}
    # Three steps would teach the last block which rows have a gradient: the fourth would save fewer.
    rmm_linear.convert(model, RMMConfig(checkpointed="packed", min_rows=8, bits=4, mask_padding=False))
    expected = gradients(model, lambda: run_step(model, example))
    plan = BlockPlan([PlannedBlock(f"roberta.encoder.layer.{place}", "recompute") for place in (0, 1)])
    plan.apply(model)
    assert same(gradients(model, lambda: run_step(model, example)), expected)
    plan.revert()
    made = plan_blocks(model, example, memory=0.9)
    assert made.predicted <= 0.9 * made.plain
    made.apply()
    assert same(gradients(model, lambda: run_step(model, example)), expected)


def cached():
    model, example = network("llama")
    model.config.use_cache = True
    return model, example


@pytest.mark.parametrize(
    ("make", "memory", "text"),
    [
        (lambda: network("mlp"), 1.5, "share"),
        (lambda: network("mlp"), "much", "size"),
        (lambda: (nn.Linear(8, 2), torch.ones(4, 8)), 0.5, "none of its modules is called"),
        (cached, 0.5, r"caches of keys and values do\. Set model\.config\.use_cache=False"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_remedy(make, memory, text):
    with pytest.raises(ValueError, match=text):
        plan_blocks(*make(), memory=memory)


class Parts(nn.Module):
    """Modules of its own, as networks of images have them."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Dense(nn.ModuleDict):
    """A list that runs by itself."""

    def forward(self, x):
        for layer in self.values():
            x = layer(x)
        return x


def pair():
    return Parts(convolution=nn.Conv2d(4, 4, 3), act=nn.ReLU(inplace=True))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            {"features": nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), "head": nn.Flatten()},
            "features.0 features.1 head",
        ),
        ({"stem": nn.Conv2d(4, 4, 3), "a": pair(), "b": pair(), "c": pair()}, "stem a b c"),
        (
            {"encoder": Parts(layers=nn.Sequential(pair(), pair())), "decoder": pair()},
            "encoder.layers.0 encoder.layers.1 decoder",
        ),
        (
            {"one": Dense({"a": pair(), "b": pair()}), "two": Dense({"a": pair(), "b": pair()})},
            "one.a one.b two.a two.b",
        ),
    ],
    ids=["chain", "siblings", "list", "lists in lists"],
)
def test_blocks_of_networks_of_images(parts, expected):
    assert find_blocks(Parts(**parts)) == expected.split()

"""Modules whose codes free nothing, since other operations keep the same tensors, are exact after the first step."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert, revert
from rmm_linear.config import OPERATIONS
from rmm_linear.context.survey import Survey
from rmm_linear.memory import track_saved

LESS = [one for one in OPERATIONS if one != "convolution"]  # so that convolutions keep their inputs


def convolutions():
    """Activations before convolutions, which keep their outputs, but for the last one."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3),
        nn.GELU(), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
    )  # fmt: skip


class Attention(nn.Module):
    """Three products of one normalized input."""

    def __init__(self):
        super().__init__()
        self.before, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, keep=None):
        h = self.norm(self.before(x))
        if keep is not None:
            keep.append(h)
        return self.q(h).tanh() + self.k(h) * 2 + self.v(h) * 3


def step(model, *inputs):
    model.zero_grad()
    model(*inputs).square().mean().backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def saved(model, *inputs):
    with track_saved(model) as ledger:
        output = model(*inputs)
    del output
    return ledger.total


@pytest.mark.parametrize("like", [torch.contiguous_format, torch.channels_last], ids=str)
def test_activations_before_convolutions(like):
    model, x = convolutions().to(memory_format=like), torch.randn(4, 3, 16, 16).contiguous(memory_format=like)
    exact = saved(model, x)
    report = convert(model, operations=LESS)
    step(model, x)
    # GELU keeps its input, which nothing else does; behind the last ReLU, the mean keeps nothing.
    assert report.kept_anyway == ["1", "3", "7"]
    assert saved(model, x) < exact
    assert "what it would free is in memory anyway, stays exact" in str(report)
    assert report.to_dict()["kept_anyway"] == ["1", "3", "7"]


def test_the_pixels_of_a_batch_alone_are_kept_where_convolutions_are_coded():
    model, x = convolutions(), torch.randn(4, 3, 16, 16)
    exact = saved(model, x)
    report = convert(model)
    step(model, x)
    assert report.kept_anyway == ["0"]
    assert saved(model, x) < exact / 4 + x.nbytes
    other = convolutions()
    report = convert(other)
    step(other, x.requires_grad_())  # a part of a larger model, perhaps
    assert report.kept_anyway == []


def test_their_gradients_are_exact():
    model, x = convolutions(), torch.randn(4, 3, 16, 16)
    twin = copy.deepcopy(model)
    convert(model, operations=LESS, exclude_modules=["5", "9"])
    step(model, x)
    assert all(map(torch.equal, step(model, x), step(twin, x)))


@pytest.mark.parametrize(("excluded", "found"), [(None, []), (["k"], ["q", "v"]), (["before"], [])], ids=str)
def test_linear_layers_that_share_an_input(excluded, found):
    model = Attention()
    report = convert(model, exclude_modules=excluded)
    step(model, torch.randn(4, 32, 64))
    assert report.kept_anyway == found


def test_a_product_keeps_a_copy_of_what_is_not_contiguous():
    class Transposing(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.linear = nn.Conv1d(16, 16, 1), nn.Linear(16, 4)

        def forward(self, x):
            h = torch.tanh(self.convolution(x))  # which keeps its output
            return self.linear(h.transpose(1, 2))

    model, x = Transposing(), torch.randn(4, 16, 40)
    exact = saved(model, x)
    report = convert(model, operations=LESS)
    step(model, x)
    assert report.kept_anyway == []
    assert saved(model, x) < exact


def test_a_norm_whose_input_an_exact_layer_keeps():
    model = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 4))
    plain = nn.Linear(128, 128)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.plain = model, plain

        def forward(self, x):
            h = self.model[0](x)
            return self.model[2](self.model[1](h)).sum(-1) + self.plain(h).sum(-1)

    both = Both()
    report = convert(both, exclude_modules=["plain"])
    step(both, torch.randn(4, 32, 128))
    assert report.kept_anyway == ["model.1"]


def test_what_others_keep():
    """Only they know for how long: callers, hooks, and the caller of the model its input."""
    model, kept = Attention(), []
    model.norm.register_forward_hook(lambda module, args, output: kept.append(output))
    report = convert(model)
    step(model, torch.randn(4, 32, 64), kept)
    assert report.kept_anyway == []


@pytest.mark.parametrize("as_returned", [tuple, lambda kept: SimpleNamespace(layers=[SimpleNamespace(keys=kept[0])])])
def test_what_the_model_returns(as_returned):
    """The caller may keep it until the backward pass, or not."""

    class Returns(Attention):
        def forward(self, x):
            kept = []
            return {"output": super().forward(x, kept), "hidden": as_returned(kept)}

    model = Returns()
    report = convert(model)
    output = model(torch.randn(4, 32, 64))
    output["output"].sum().backward()
    assert report.kept_anyway == []


def test_one_of_two_calls_is_enough():
    """A module that frees something in one of its calls saves codes in all."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.relu = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1), nn.ReLU()

        def forward(self, x):
            return self.relu(self.two(self.relu(self.one(x))))

    model = Twice()
    report = convert(model, operations=LESS)
    step(model, torch.randn(8, 4, 64))
    assert report.kept_anyway == []


def test_addresses_are_used_again():
    class Module(nn.Module):
        rmm_index, rmm_operation = 0, "activation"

    survey, weight = Survey(), torch.ones(1, requires_grad=True)
    x = torch.randn(1000) * weight
    survey.note(Module(), x, x, None)
    address = x.data_ptr()
    del x
    others = [torch.randn(1000) for _ in range(50)]
    assert survey.decide(None) == ([], set())
    assert others is not None
    assert isinstance(address, int)


def test_the_noise_of_the_others_stays():
    """Seeds belong to modules: what is exact now leaves the numbers of the others as they were."""
    x, found = torch.randn(4, 3, 16, 16), []
    for forgets in (False, True):
        torch.manual_seed(3)
        model = convolutions()
        report = convert(model, operations=LESS)
        step(model, x)
        assert report.context is not None
        if forgets:
            report.context.kept_anyway.clear()
        torch.manual_seed(5)
        found.append(step(model, x))
    # ReLU's mask is exact: the others' codes are all of the noise, but for Tanh's, which is behind these.
    assert torch.equal(found[0][-1], found[1][-1])
    assert found[0][6] is not None
    assert not torch.equal(found[0][0], found[1][0])


def test_with_an_example():
    model, x = convolutions(), torch.randn(4, 3, 16, 16)
    state = torch.get_rng_state()
    report = convert(model, operations=LESS, example=x)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.kept_anyway == ["1", "3", "7"]
    assert report.memory is not None
    assert report.memory.after == saved(model, x)


def test_passes_that_show_nothing():
    """In eval mode, without gradients, inside of a checkpoint, with hooks that save something else."""
    model, x = convolutions(), torch.randn(4, 3, 16, 16, requires_grad=True)
    report = convert(model, operations=LESS)
    model.eval()
    model(x).sum().backward()
    model.train()
    with torch.no_grad():
        model(x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):  # where nothing keeps its input
        model(x).sum().backward()
    assert report.kept_anyway == []
    other = convolutions()
    report = convert(other, operations=LESS)
    checkpoint(other, x, use_reentrant=False).sum().backward()
    assert report.kept_anyway == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_know_it(copied):
    model, x = convolutions(), torch.randn(4, 3, 16, 16)
    convert(model, operations=LESS)
    step(model, x)
    twin = copied(model)
    assert saved(twin, x) == saved(model, x)
    revert(twin)
    assert not any("rmm" in name for module in twin.modules() for name in vars(module))


def test_a_pass_that_fails_shows_nothing():
    """Its traceback keeps what the pass has made."""
    model, x = nn.Sequential(*convolutions(), nn.Flatten(), nn.Linear(9, 9)), torch.randn(4, 3, 16, 16)
    report = convert(model, operations=LESS)
    with pytest.raises(RuntimeError):
        model(x)
    assert report.context is not None
    assert report.context.survey is None
    assert report.kept_anyway == []

"""Elementwise modules that are found by trying them; their gradients are in tests/contracts/test_modules.py."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear import convert
from rmm_linear.activations.elementwise import PackedElementwise, _Trial, elementwise_form
from rmm_linear.conversion.packed import widths_of
from rmm_linear.variance import GradientProbe

OUTER = nn.Parameter(torch.ones(()))


class By(nn.Module):
    """Applies a function."""

    def __init__(self, function):
        super().__init__()
        self.function, self.calls = function, 0

    def forward(self, x):
        self.calls += 1
        return self.function(self, x)


FOUND = {"sine": lambda self, x: x.sin() * x, "cut": lambda self, x: x.clamp(-1, 1)}
NOT = {
    "saves nothing": lambda self, x: x + 1,
    "same memory": lambda self, x: x,
    "rows": lambda self, x: x.softmax(-1),
    "places": lambda self, x: x * torch.arange(10),
    "random": lambda self, x: x.sin() * torch.rand_like(x),
    "another dtype": lambda self, x: x.sin().double(),
    "another shape": lambda self, x: x.sin()[:2],
    "in place": lambda self, x: x.sin_(),
    "no tensor": lambda self, x: (x.sin(),),
    "its mode": lambda self, x: x.sin() if not self.training else x.sin() + torch.rand_like(x),
    "a parameter of another module": lambda self, x: x.sin() * OUTER,
    "something else": lambda self, x: x @ torch.ones(3, 3),
    "the least": lambda self, x: torch.log1p(x - x.min()),
    "large ones": lambda self, x: torch.where(x.norm() > 100, x * 50 / x.norm(), x) ** 2,
    "its gradient": lambda self, x: cut(x.sin() * x),
    "it is kept": lambda self, x: kept(self, x.sin()) * x,
}


def cut(x):
    """A gradient that is not linear in that of the output."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return x


def kept(self, x):
    self.left = x
    return x


@pytest.mark.parametrize("name", [*FOUND, *NOT])
def test_what_is_elementwise(name):
    module, state = By((FOUND | NOT)[name]).eval(), torch.get_rng_state()
    assert (elementwise_form(module, {}) is not None) == (name in FOUND)
    assert (module.calls, module.training) == (0, False)
    assert not hasattr(module, "left")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(), nn.Softmax(-1), nn.Linear(10, 10), nn.PReLU(2)])
def test_modules_of_pytorch_that_are_not(module):
    assert elementwise_form(module, {}) is None


class Between(nn.Module):
    """Applies a function of the outputs of linear layers, and another layer to the result."""

    def __init__(self, function, outputs=(12,), sink=True):
        super().__init__()
        self.function, self.act, self.norm = function, nn.GELU(), nn.Identity()
        self.sources = [f"source{i}" for i in range(len(outputs))]
        for name, size in zip(self.sources, outputs, strict=True):
            self.add_module(name, nn.Linear(8, size))
        self.sink = nn.Linear(12, 8) if sink else None

    def forward(self, x):
        result = self.function(self, x, *(getattr(self, name)(x) for name in self.sources))
        return result if self.sink is None else self.sink(result)


class Behind(Between):
    """With a residual."""

    def forward(self, x):
        return x + super().forward(x).exp()


def halves(self, x, u):
    a, b = u.chunk(2, -1)
    return a.sin() * b


BETWEEN = {
    "one": (Between(lambda self, x, u: u * u.exp()), ("whole",)),
    "two": (Between(lambda self, x, u, v: u * v, (12, 12)), ("whole", "whole")),
    "its own and a child's": (Between(lambda self, x, u, v: self.act(u) * v, (12, 12)), ("whole", "whole")),
    "halves": (Between(halves, (24,)), ("halves",)),
    "pairs": (Between(lambda self, x, u: u[..., ::2].sin() * u[..., 1::2], (24,)), ("pairs",)),
    "three in two": (Between(lambda self, x, u, v: halves(self, x, u) * v, (24, 12)), ("halves", "whole")),
    "with more behind it": (Behind(lambda self, x, u: u * u.exp()), ("whole",)),
    "without a sink": (Between(lambda self, x, u: u * u.exp(), sink=False), ("whole",)),
}
NOT_BETWEEN = {
    "a child alone": lambda self, x, u: self.act(u),
    "the input too": lambda self, x, u: u.sin() * x.mean(),
    "rows": lambda self, x, u: u.softmax(-1) * u,
    "places": lambda self, x, u: u * u.roll(1, -1),
    "random": lambda self, x, u: u.sin() * torch.rand_like(u),
    "in place": lambda self, x, u: u.mul_(2).sin(),
    "nothing": lambda self, x, u: u + 1,
}


@pytest.mark.parametrize("name", BETWEEN)
def test_elementwise_code_between_linear_layers(name):
    module, layouts = BETWEEN[name]
    state, before = torch.get_rng_state(), [dict(vars(one)) for one in module.modules()]
    form = elementwise_form(module, widths_of(module))
    assert form is not None
    assert form.layouts == layouts
    assert (form.sources, form.sink) == (tuple(module.sources), None if module.sink is None else "sink")
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(one)) for one in module.modules()] == before


@pytest.mark.parametrize("shape", [(64, 32), (4, 16, 32), (2, 32, 6, 6)])
@pytest.mark.parametrize("make", [nn.PReLU, nn.SELU, lambda: By(FOUND["sine"])])
def test_what_follows_may_write_into_the_output(make, shape):
    class Adding(nn.Module):
        def forward(self, x):
            x += 1
            return x

    for behind in (Adding(), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)):
        model, x = nn.Sequential(make(), behind).train(), torch.randn(shape, requires_grad=True)
        exact = copy.deepcopy(model)
        convert(model, operations=["activation"])
        found = []
        for one in (model, exact):
            torch.manual_seed(1)
            found.append(one(x))
            found[-1].sum().backward()
        assert torch.equal(*found)
        assert found[0].stride() == found[1].stride()


class Switched(nn.Module):
    """Elementwise, unless it is asked to normalize its rows."""

    normalize = False

    def forward(self, x):
        x = x.sin() * x
        return x / x.norm(dim=-1, keepdim=True) if self.normalize else x


def test_a_setting_that_changes_is_followed(caplog):
    model, x = nn.Sequential(Switched()).train(), torch.randn(64, 32, requires_grad=True)
    convert(model, operations=["activation"])
    assert isinstance(model[0], PackedElementwise)
    for normalizes in (True, False):
        model[0].normalize = normalizes
        exact = Switched()
        exact.normalize = normalizes
        y = torch.randn(64, 32)
        expected, found = (torch.autograd.grad((one(x) * y).sum(), x)[0] for one in (exact, model))
        assert torch.equal(expected, found) == normalizes
    assert sum("not elementwise as it was" in one for one in caplog.messages) == 1


def test_padding_is_saved_and_may_reach_the_loss():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.act = nn.Embedding(50, 32), By(FOUND["sine"])

        def forward(self, ids, attention_mask=None):
            return self.act(self.embedding(ids)).mean(1)

    model, mask = Averaged().train(), torch.ones(8, 32, dtype=torch.long)
    mask[:, 20:] = 0
    convert(model, operations=["activation"])
    for _ in range(4):
        model(torch.randint(0, 50, (8, 32)), attention_mask=mask).sum().backward()


def test_trials_do_not_depend_on_the_default_device():
    """As on an accelerator, where tensors that are made without a device are, and generators are not."""
    module = BETWEEN["two"][0]
    with torch.device("meta"):
        assert _Trial(module, widths_of(module), torch.device("cpu")).form() == elementwise_form(
            module, widths_of(module)
        )


@pytest.mark.parametrize("name", NOT_BETWEEN)
def test_other_code_between_linear_layers(name):
    module = Between(NOT_BETWEEN[name])
    assert elementwise_form(module, widths_of(module)) is None


def test_children_between_are_not_packed_by_themselves():
    model = nn.Sequential(copy.deepcopy(BETWEEN["its own and a child's"][0]))
    report = convert(model, operations=("activation",))
    assert [*report.packed] == ["0"]
    x = torch.randn(5, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


def test_an_excluded_module_leaves_its_children():
    model = nn.Sequential(copy.deepcopy(BETWEEN["its own and a child's"][0]))
    report = convert(model, operations=("activation",), exclude_modules="0")
    assert [*report.packed] == ["0.act"]


def test_a_function_without_a_second_derivative_stays_exact(caplog):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, alpha):
            ctx.save_for_backward(x, alpha)
            return x.square() * alpha

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, y):
            x, alpha = ctx.saved_tensors
            return 2 * y * x * alpha, (y * x.square()).sum().reshape(1)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor([0.7]))

        def forward(self, x):
            return Once.apply(x, self.alpha)

    model, x = nn.Sequential(Scaled()), torch.randn(5, 8, requires_grad=True)
    convert(model, operations=("activation",))
    for _ in range(2):
        model.zero_grad()
        model(x).sum().backward()
        assert torch.allclose(model[0].alpha.grad, x.detach().square().sum())
    assert caplog.text.count("runs exactly") == 1


def test_frozen_parameters_and_inputs_have_no_code():
    module = copy.deepcopy(BETWEEN["two"][0])
    model = nn.Sequential(module)
    module.source0.requires_grad_(False)
    convert(model, operations=("activation",))
    model(torch.randn(5, 8)).sum().backward()
    assert module.source0.weight.grad is None
    assert module.source1.weight.grad is not None


class Capped(nn.Module):
    """A model whose logits go through an elementwise module before its loss."""

    def __init__(self):
        super().__init__()
        self.model, self.cap = tiny_model("llama", dropout=0.0), By(lambda self, x: torch.tanh(x / 3) * 3)

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, ids):
        logits = self.cap(self.model(ids).logits)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_logits_that_are_lazy_keep_their_gradient():
    model, ids = Capped().train(), token_ids(4, 20)
    exact = model(ids)
    exact.backward()
    wanted = model.model.get_output_embeddings().weight.grad.clone()
    model.zero_grad()
    convert(model, operations=("activation", "logits"))
    assert isinstance(model.cap, PackedElementwise)
    model.get_output_embeddings().rmm_chunk = 7  # fewer than the rows, so that logits are lazy
    loss = model(ids)
    assert torch.allclose(loss, exact, rtol=1e-6)  # of chunks, in another order of sums
    loss.backward()
    found = model.model.get_output_embeddings().weight.grad
    assert float((found - wanted).norm()) < 0.1 * float(wanted.norm())  # of codes of 4 bits


def test_counters_stay():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n += self.training
            return x * torch.sigmoid(1.3 * x)

    model = nn.Sequential(nn.Linear(8, 8), Counted())
    convert(model, dry_run=True)
    convert(model)
    assert int(model[1].n) == 0
    model(torch.randn(70, 8)).sum().backward()
    assert int(model[1].n) == 1


def test_hooks_of_others_see_what_they_saw():
    """What they keep has its gradient, and is what the layer returns."""
    model, x, seen = nn.Sequential(copy.deepcopy(BETWEEN["one"][0])), torch.randn(5, 8), []
    model[0].source0.register_forward_hook(lambda module, args, output: seen.append(output))
    wanted = []
    for _ in range(2):
        model.zero_grad()
        (model(x).sum() + seen[-1].square().sum()).backward()
        wanted.append(model[0].source0.weight.grad.clone())
        if len(wanted) == 1:
            convert(model, operations=("activation",))
    assert torch.equal(seen[0], seen[-1])
    assert (wanted[0] - wanted[1]).norm() < 0.2 * wanted[0].norm()  # codes of 4 bits
    assert len(model[0].source0._forward_hooks) == 1


def test_hooks_for_saved_tensors_of_what_is_around():
    """They see what is saved around the code, and the codes, and nothing of the code's own graph."""
    model, seen = nn.Sequential(copy.deepcopy(BETWEEN["with more behind it"][0])), []
    convert(model, operations=("activation",))

    def note(tensor):
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
        loss = model(torch.randn(5, 8)).sum()
    loss.backward()
    codes = [one for one in seen if one.dtype == torch.uint8]
    assert len(codes) == 1
    assert sum(one.shape == (5, 12) for one in seen) == 1  # what the sink reads
    assert any(one.shape == (5, 8) for one in seen)  # what follows it saves


@pytest.mark.parametrize(("module", "shape"), [(nn.GLU(1), (3, 4, 8)), (nn.AdaptiveAvgPool1d(5), (3, 4, 8))])
def test_where_the_output_has_another_shape_than_when_tried_it_is_exact(module, shape, monkeypatch):
    assert elementwise_form(module, {}) is not None
    model, x = nn.Sequential(copy.deepcopy(module)), torch.randn(shape, requires_grad=True)
    convert(model, operations=("activation",))
    found, expected = (torch.autograd.grad(one(x).square().sum(), x)[0] for one in (model, module))
    assert torch.equal(found, expected)
    forward, calls = type(module).forward, []
    monkeypatch.setattr(type(module), "forward", lambda self, x: calls.append(x) or forward(self, x))
    model(x)
    assert len(calls) == 1  # after the first time it is not tried again


def test_a_probe_sees_the_gradients_of_sources():
    model, x, found = nn.Sequential(copy.deepcopy(BETWEEN["two"][0])), torch.randn(5, 8), []
    for _ in range(2):
        with GradientProbe(model, every=1) as probe:
            model(x).square().sum().backward()
        found.append(torch.tensor([row.sgd_variance for row in probe.rows]))
        if len(found) == 1:
            convert(model, operations=("activation",))
    assert len(found[0]) == 3
    torch.testing.assert_close(*found, rtol=0.3, atol=0)


def test_a_layer_that_is_called_without_its_hooks_leaves_the_module_exact(caplog):
    class Direct(Between):
        def forward(self, x):
            u = self.source0(x) if not self.training else self.source0.forward(x)
            return self.sink(u * u.exp())

    model, x = nn.Sequential(Direct(None)), torch.randn(5, 8)
    exact = copy.deepcopy(model)
    convert(model, operations=("activation",))
    for one in (model, exact):
        one(x).square().sum().backward()
    assert torch.equal(model[0].source0.weight.grad, exact[0].source0.weight.grad)

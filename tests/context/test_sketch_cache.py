"""Layers that read the same tensor share one sketch, and nobody else does."""

import gc

import pytest
import torch
from cases import ROUGH
from helpers import SEED_BYTES, tiny_model, token_ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert
from rmm_linear.layers import linear
from rmm_linear.memory import track_saved
from rmm_linear.packing import encoded_bytes


class Siblings(nn.Module):
    """Three layers that read one input, which `touch` may change in between."""

    def __init__(self, touch=None):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
        self.touch = touch or (lambda x: x)

    def forward(self, x):
        x = x * 1.0
        first = self.a(x)
        x = self.touch(x)
        return first + self.b(x) + self.c(x)


def kept_by(model, x):
    with track_saved(model) as kept:
        output = model(x)
    return kept.by_module, output


@pytest.mark.parametrize("bits", [None, 8, 4, 3, 2])
def test_siblings_keep_one_sketch(bits):
    model = Siblings()
    report = convert(model, bits=bits, **ROUGH)
    by_module, output = kept_by(model, torch.randn(40, 8))
    size = 10 * 8 * 4 if bits is None else encoded_bytes(10, 8, bits)
    assert by_module == {"a": size + SEED_BYTES}
    output.sum().backward()
    assert report.groups == [("a", "b", "c")]
    # One S: with equal gradients by the output the three estimates are the same.
    assert torch.equal(model.a.weight.grad, model.b.weight.grad)


def test_query_key_and_value_keep_one_sketch_and_the_rest_the_formula():
    model = tiny_model("roberta", dropout=0.0).train()
    report = convert(model, kind="countsketch", ratio=0.25, min_rows=1, bits=4)
    with track_saved(model) as kept:
        model(input_ids=token_ids(4, 20)).logits.sum().backward()
    rows = 20
    for layer in (0, 1):
        stem = f"roberta.encoder.layer.{layer}"
        one, wide = encoded_bytes(rows, 16, 4) + SEED_BYTES, encoded_bytes(rows, 32, 4) + SEED_BYTES
        assert kept.by_module[f"{stem}.attention.self.query"] == one
        assert f"{stem}.attention.self.key" not in kept.by_module
        assert f"{stem}.attention.self.value" not in kept.by_module
        assert kept.by_module[f"{stem}.attention.output.dense"] == one
        assert kept.by_module[f"{stem}.intermediate.dense"] == one
        assert kept.by_module[f"{stem}.output.dense"] == wide
        assert tuple(f"{stem}.attention.self.{n}" for n in ("query", "key", "value")) in report.groups


@pytest.mark.parametrize(
    ("touch", "overrides", "kept", "group"),
    [
        (None, {"c": {"ratio": 0.5}}, {"a": 10, "c": 20}, ("a", "b")),
        (lambda x: x.mul_(2), {}, {"a": 10, "b": 10}, ("b", "c")),
        (lambda x: x.clone(), {}, {"a": 10, "b": 10}, ("b", "c")),
    ],
    ids=["another configuration", "a change in place", "an equal tensor"],
)
def test_no_sharing_after(touch, overrides, kept, group):
    model = Siblings(touch=touch)
    report = convert(model, overrides=overrides, **ROUGH)
    by_module, output = kept_by(model, torch.randn(40, 8))
    assert by_module == {name: rows * 8 * 4 + SEED_BYTES for name, rows in kept.items()}
    output.sum().backward()
    assert report.groups == [group]


def test_no_sharing_through_memory_that_is_used_again():
    """As an engine's buffer, which is written through another tensor: its version counter says nothing."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.buffer = nn.Linear(8, 4), nn.Linear(8, 4), torch.empty(40, 8)

        def forward(self, first, second):
            output = 0
            for layer, x in ((self.a, first), (self.b, second)):
                self.buffer.data.copy_(x)
                output = output + layer(self.buffer.data)
            return output

    model = Reads()
    report = convert(model, **ROUGH)
    first, second = torch.randn(40, 8), torch.randn(40, 8)
    for _ in range(2):
        model.zero_grad()
        model(first, second).sum().backward()
    assert report.groups == []


def test_no_sharing_between_steps():
    model = Siblings()
    convert(model, **ROUGH)
    x = torch.randn(40, 8)
    first, second = (kept_by(model, x) for _ in range(2))
    first[1].sum().backward()
    gradient = model.a.weight.grad.clone()
    model.zero_grad()
    second[1].sum().backward()
    assert not torch.equal(gradient, model.a.weight.grad)


def test_the_sketch_is_freed_after_the_last_sibling():
    model = Siblings()
    convert(model, **ROUGH)
    with track_saved(model) as kept:
        a, b, c = (model.a, model.b, model.c)
        outputs = {}
        for name, layer in (("a", a), ("b", b), ("c", c)):
            layer.register_forward_hook(lambda m, i, o, name=name: outputs.__setitem__(name, o))
        model(torch.randn(40, 8))
        live = lambda: len(kept._live)  # noqa: E731
        assert live() == 2  # Z and the seed
        for name in "ab":
            outputs.pop(name).sum().backward()
            gc.collect()
            assert live() == 2
        outputs.pop("c").sum().backward()
        gc.collect()
        assert live() == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_checkpointing_the_recomputation_shares_too(reentrant):
    model = Siblings()
    model.inner = Siblings()
    model.forward = lambda x: checkpoint(model.inner, x, use_reentrant=reentrant)
    report = convert(model, **ROUGH)
    model(torch.randn(40, 8, requires_grad=True)).sum().backward()
    assert report.groups[-1] == ("inner.a", "inner.b", "inner.c")
    assert torch.equal(model.inner.a.weight.grad, model.inner.c.weight.grad)


@pytest.mark.parametrize("call", [lambda m, x: m.forward(x), lambda m, x: m[0](x)], ids=["forward", "layer"])
def test_nothing_is_shared_outside_a_forward_pass(call):
    """No hook tells such calls apart: a sketch kept for the same tensor would be used in every step."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4))
    convert(model, kind="countsketch", ratio=0.25, min_rows=1)
    x = torch.randn(40, 6)
    gradients = []
    for _ in range(2):
        model.zero_grad()
        call(model, x).square().sum().backward()
        gradients.append(model[0].weight.grad.clone())
    assert not torch.equal(*gradients)


def test_steps_inside_of_a_forward_pass_leave_no_sketches():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.most = nn.Linear(8, 8), 0

        def forward(self, x):
            for _ in range(300):
                self.layer(torch.randn(40, 8)).sum().backward()
                self.most = max(self.most, len(self.layer.rmm_context.sketch_cache._entries))
            return self.layer(x)

    model = Inner()
    convert(model, **ROUGH)
    for _ in range(2):  # the first step takes the general way
        model(torch.randn(40, 8)).sum().backward()
    assert model.most < 100


def test_siblings_that_are_called_in_a_later_step_first_share_too(monkeypatch):
    """As in a model with branches, of which the first step has shown one."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Siblings(), Siblings()

        def forward(self, x, branch):
            return (self.first, self.second)[branch](x)

    model = Branches()
    convert(model, **ROUGH)
    made, run = [], linear.save.run
    monkeypatch.setattr(linear.save, "run", lambda *args: made.append(1) or run(*args))
    for branch in (0, 0, 1, 1, 0):
        made.clear()
        model(torch.randn(40, 8), branch).sum().backward()
        assert len(made) == 1

"""Attention with code of its own that stays exact, since running it again would not repeat it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from region_helpers import Scores, batch, model_of, step
from torch import nn

from rmm_linear import convert, revert


class Unrepeatable(Scores):
    """Its random numbers are those of another library."""

    numbers = np.random.default_rng(0)

    def kept(self, p):
        return p * torch.from_numpy(self.numbers.random(p.shape)).float()


class Forgetful(Scores):
    """Without gradients, it computes something else."""

    def kept(self, p):
        return p if torch.is_grad_enabled() else p.detach() * 1.01


@pytest.mark.parametrize("kind", [Unrepeatable, Forgetful])
def test_a_replay_that_differs_stays_exact_and_says_so(kind, caplog):
    model, x = model_of(kind), batch()
    convert(model, operations="attention")
    with caplog.at_level(logging.WARNING):
        found = step(model, 5, x)
    assert "stays exact and saves what it saved before: run again, its code has another" in caplog.text
    revert(model)
    if kind is Forgetful:
        expected = step(model, 5, x)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(one, found[1][name]) for name, one in expected[1].items())


class After(Scores):
    """It reads a source behind the sink too."""

    def forward(self, x, bias=None):
        q, k, v = self.q(x), self.heads(self.k(x)), self.heads(self.v(x))
        p = (self.heads(q) @ k.transpose(-1, -2)).softmax(-1)
        return self.o((p @ v).transpose(1, 2).flatten(2)) * q.sigmoid(), None


class Weighed(Scores):
    """It reads the weight of a linear layer itself."""

    def scores(self, scores, bias):
        return scores * self.k.weight.square().mean()


class Remembering(Scores):
    """It leaves its probabilities where other code may read them."""

    def kept(self, p):
        self.last = p
        return p


class Counting(Scores):
    """It counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def kept(self, p):
        self.count += 1
        return p


class Borrowing(Scores):
    """It reads a parameter of the model around it."""

    def scores(self, scores, bias):
        return scores + self.borrowed[0] * 2


REASONS = {
    After: "run again, its code has another gradient",
    Weighed: "run again, its code has another gradient",
    Remembering: "it leaves tensors that have a gradient where other code may read them",
    Counting: "it changes its buffers",
    Borrowing: "it reads parameters, or tensors that have a gradient, which are neither its own nor arguments",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_a_replay_cannot_repeat_stays_exact(kind):
    model, exact, x = model_of(kind), model_of(kind), batch()
    for one in (model, exact):
        for attention in (one.first, one.second):
            attention.borrowed = [one.bias]
    convert(model, operations="attention")
    for seed in (5, 6):
        found, expected = step(model, seed, x), step(exact, seed, x)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert model.first.rmm_exact == REASONS[kind]
    for one, other in zip(model.buffers(), exact.buffers(), strict=True):
        assert torch.equal(one, other)


class Growing(Scores):
    """It calls a source once more from the second and again from the third call on."""

    def scores(self, scores, bias):
        for _ in range(self.extra):
            scores = scores + self.heads(self.q(self.x)).mean()
        return scores

    def forward(self, x, bias=None):
        self.x = x.detach()
        return super().forward(x, bias)


def test_sources_that_are_called_otherwise_are_looked_at_again_and_then_left_exact():
    model, exact, x = model_of(Growing), model_of(Growing), batch()
    convert(model, operations="attention")
    for seed, extra in enumerate((0, 1, 1, 2, 2)):
        for one in (model, exact):
            one.first.extra = one.second.extra = extra
        found, expected = step(model, seed, x), step(exact, seed, x)
        assert torch.equal(found[0], expected[0])
        assert found[1].keys() == expected[1].keys()
    assert model.first.rmm_exact == "it calls its linear layers otherwise from call to call"
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


def test_the_report_says_which_attention_is_exact():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            self.left = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)
            return self.o(self.left)

    model, x = nn.Sequential(nn.Linear(8, 8), Leaving()), torch.randn(3, 30, 8)
    report = convert(model)
    assert report.exact_calls == {}
    model(x).sum().backward()
    assert [*report.exact_calls] == ["1"]
    assert report.to_dict()["exact_calls"] == report.exact_calls
    assert "where other code may read them: stays exact" in str(report)


def test_outputs_that_a_hook_keeps_have_their_gradient():
    model, exact, x = model_of(Scores), model_of(Scores), batch()
    report, found = convert(model, operations="attention"), []
    for one in (model, exact):
        kept = []
        one.first.q.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        torch.manual_seed(0)
        (one(x)[0].sum() + kept[0].square().sum()).backward()
        found.append(one.first.q.weight.grad)
    assert (found[0] - found[1]).norm() < 0.2 * found[1].norm()  # the other attention's codes are noise
    assert "hooks of its linear layers may keep outputs" in report.exact_calls["first"]
    assert "second" not in report.exact_calls

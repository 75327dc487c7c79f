"""Small attentions with code of their own, each with one peculiarity, and what is compared of them."""

from __future__ import annotations

import math

import torch
from statistical import Z
from torch import nn
from torch.nn import functional as F

from rmm_linear.activations.region import PackedRegion

BATCH, TOKENS, WIDTH, HEADS = 3, 24, 32, 4


class Scores(nn.Module):
    """Attention whose scores are changed, and whose probabilities are changed, by functions of the subclass."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.more = nn.Parameter(torch.randn(HEADS, 1, 1))

    def scores(self, scores, bias):
        return scores

    def kept(self, p):
        return p

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x, bias=None):
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        p = self.kept(self.scores(q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS), bias).softmax(-1))
        return self.o((p @ v).transpose(1, 2).flatten(2)), p


class Capped(Scores):
    def scores(self, scores, bias):
        return torch.tanh(scores / 2) * 2


class Sinks(Scores):
    def scores(self, scores, bias):
        return torch.cat((scores, self.more.expand(len(scores), -1, scores.shape[2], 1)), -1)

    def kept(self, p):
        return p[..., :-1]


class Biased(Scores):
    def scores(self, scores, bias):
        return scores + bias * self.more


class Dropped(Scores):
    def kept(self, p):
        return F.dropout(p, 0.3, self.training)


class Fused(Scores):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        del self.q, self.k, self.v

    def forward(self, x, bias=None):
        q, k, v = (self.heads(one) for one in self.qkv(x).chunk(3, -1))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class Writing(Scores):
    def forward(self, x, bias=None):
        q = self.q(x)
        q /= math.sqrt(WIDTH // HEADS)
        q, k, v = self.heads(q), self.heads(self.k(x)), self.heads(self.v(x))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class Latent(Scores):
    """A source reads what another has made, and so does the region."""

    def forward(self, x, bias=None):
        latent = self.v(x)
        q, k = self.heads(self.q(x)), self.heads(self.k(F.silu(latent)))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ self.heads(latent)).transpose(1, 2).flatten(2)), None


class Open(Scores):
    """The region ends with the module."""

    def forward(self, x, bias=None):
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2), None


class Gated(Scores):
    """It reads its own input between the linear layers too."""

    def forward(self, x, bias=None):
        q, k, v = (self.heads(one(x)) for one in (self.q, self.k, self.v))
        return self.o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2) * x.sigmoid()), None


KINDS = [Scores, Capped, Sinks, Biased, Dropped, Fused, Writing, Latent, Open, Gated]


class Model(nn.Module):
    """Two attentions, and a loss that may read the probabilities."""

    def __init__(self, kind, weights=0.0):
        super().__init__()
        self.first, self.second, self.weights = kind(), kind(), weights
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS))

    def forward(self, x):
        x, p = self.first(x, bias=self.bias)
        x, _ = self.second(x.relu(), bias=self.bias)
        extra = self.weights * (p * torch.arange(TOKENS)).square().sum() if self.weights else 0
        return x.square().sum() + extra, x


def model_of(kind, **named):
    torch.manual_seed(1)
    return Model(kind, **named).train()


def step(model, seed, x):
    model.zero_grad()
    torch.manual_seed(seed)
    loss, output = model(x)
    loss.backward()
    return output.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def batch():
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))


def forms(model):
    context = next(one.rmm_context for one in model.modules() if isinstance(one, PackedRegion))
    return list(context.regions.values())


def assert_unbiased(model, exact, x, draws=40):
    """M · ‖mean error‖² is at most Z² times the trace of the covariance, and the bias of softmax."""
    errors = {}
    expected = step(exact, 5, x)[1]
    for draw in range(draws):
        model.first.rmm_context.salt = draw + 1  # other codes, and the same dropout
        for name, gradient in step(model, 5, x)[1].items():
            errors.setdefault(name, []).append((gradient - expected[name]).double())
    assert errors.keys() == expected.keys()
    largest = max(float(one.norm()) for one in expected.values())
    for name, values in errors.items():
        error = torch.stack(values)
        noise = float(error.var(0).sum())
        assert float(error.mean(0).square().sum()) <= (Z**2 / draws + 0.002) * noise + (1e-6 * largest) ** 2, name

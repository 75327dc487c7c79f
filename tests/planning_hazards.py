"""Models in which order matters: changes in place, random numbers in branches, shared norms, switched regions."""

import torch
from torch import nn

WIDTH = 16


class Hazard(nn.Module):
    """Layers for all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("state", torch.ones(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def stack(self, x, function=torch.tanh):
        for layer in self.layers:
            x = function(layer(x))
        return x


class Branches(Hazard):
    """Independent branches, which draw random numbers."""

    def forward(self, x):
        return sum(nn.functional.dropout(torch.tanh(layer(x)), 0.3) for layer in self.layers)


class Counting(Hazard):
    """A buffer that is changed between two uses, each of which sees another value."""

    def forward(self, x):
        self.state.mul_(0.5)
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x)) * (self.state + 0)
        self.state.mul_(3)
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x)) + (self.state + 0)
        return x


class Averaging(Hazard):
    """Changes a buffer through ``.data``, of which autograd sees nothing."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x * (self.state + 0)
            self.state.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Queueing(Hazard):
    """Writes into a part of a buffer between two uses of all of it."""

    def forward(self, x):
        x = torch.tanh(self.layers[0](x)) * (self.state * 2)
        self.state[:4].copy_(x.detach().mean(0)[:4])
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) * (self.state * 2)
        return x


class Shared(Hazard):
    """A norm that is used in two branches and after them."""

    def forward(self, x):
        first, second = self.norm(torch.tanh(self.layers[0](x))), self.norm(torch.tanh(self.layers[1](x)))
        return self.stack(self.norm(first + second) + first)


class Positional(Hazard):
    """Functions that get ``inplace`` by position or in another way."""

    def forward(self, x):
        functions = (nn.ReLU6(True), nn.Hardswish(True), nn.ELU(1.0, True), nn.LeakyReLU(0.1, True))
        for layer, function in zip(self.layers, functions, strict=False):
            x = function(self.norm(layer(x)))
        x = self.layers[5](x)
        x += 1
        torch.mul(x.detach(), 2, out=torch.empty_like(x))
        return x


class Switched(Hazard):
    """Nested regions."""

    def forward(self, x):
        x = self.stack(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[0](x)
            with torch.no_grad():
                scale = self.layers[1](x).float().abs().mean()
            x = torch.tanh(self.layers[2](x))
        return self.stack(x.float() * scale)


class Read(Hazard):
    """A tensor that many read, whose gradients add up in an order; and a branch that nobody uses."""

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        unused = self.stack(x)
        branches = [torch.tanh(layer(x)) for layer in self.layers[1:]]
        return sum(torch.tanh(branch * x) for branch in branches), unused.detach()


HAZARDS = [Branches, Counting, Averaging, Queueing, Shared, Positional, Switched, Read]


def made(kind):
    torch.manual_seed(0)
    return kind().train(), torch.randn(200, WIDTH)

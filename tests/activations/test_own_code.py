"""Methods with other calls in them: which calls are found by which names, and what stays the method's own."""

import functools
import operator

import pytest
import torch
import torch.nn.functional
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import linear as imported

from rmm_linear.activations.own_code import Calls, own_code

HALF = 0.5


def noted(name, run):
    def ours(module, place, *args, **named):
        module.calls.append((name, place))
        return run(*args, **named)

    return ours


CALLS = Calls(
    {F.linear: "linear", torch.conv1d: "conv1d"},
    {"matmul": ".matmul"},
    {
        "linear": noted("linear", F.linear), "conv1d": noted("conv1d", torch.conv1d),
        ".matmul": noted(".matmul", torch.matmul), "*": noted("*", operator.mul), "@": noted("@", torch.matmul),
    },
)  # fmt: skip


def doubled(method):
    @functools.wraps(method)
    def wrapper(self, x):
        return 2 * method(self, x)

    return wrapper


def hidden(method):
    return functools.update_wrapper(functools.partialmethod(method)._make_unbound_method(), method)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale, self.factor = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4)), 3.0
        self.calls = []

    def forward(self, x):
        return x * 2


class Names(Base):
    def forward(self, x):
        one = F.linear(x, self.weight) + nn.functional.linear(x, self.weight) + imported(x, self.weight)
        one = one + torch.nn.functional.linear(x, weight=self.weight)
        return one + torch.conv1d(x.unsqueeze(0), self.weight.unsqueeze(-1).mT.mT).squeeze(0).mean() + torch.sin(x)


class Operators(Base):
    def forward(self, x, *, shift: float = HALF):
        size = x.shape[0] * len(self.scale) * 2
        scaled = self.scale[None] * x * shift + size
        return scaled @ self.weight + x.matmul(self.weight) + self.factor * torch.ones(4)


class Decorated(Base):
    @doubled
    def forward(self, x):
        return F.linear(x, self.weight)


class Hidden(Base):
    @hidden
    def forward(self, x):
        return F.linear(x, self.weight)


class Super(Base):
    __secret = 5.0

    def forward(self, x):
        F = torch.nn.functional
        inner = lambda y: imported(y, self.weight)  # noqa: E731
        return super().forward(x) + F.linear(x, self.weight) + self._helped(x) + inner(x) + self.__secret

    def _helped(self, x):
        return x @ self.weight


class Loops(Base):
    def forward(self, x):
        state, total = torch.zeros(4), torch.zeros(4)
        for row in x:
            each = torch.sin(row)
            each = each * torch.cos(row)  # made in this step
            state = state * torch.cos(row)  # from the last step's
            total = total + each + state
        with torch.no_grad():
            total = total + torch.sin(x[0]) * torch.cos(x[0])
        return total


class WithoutGradients(Base):
    @torch.no_grad()
    def forward(self, x):
        return torch.sin(x) * torch.cos(x)


class Exec(Base):
    pass


space = dict(globals())
exec("def forward(self, x):\n    return F.linear(x, self.weight)", space)
Exec.forward = space["forward"]


FOUND = {
    Names: ["linear"] * 4 + ["conv1d"],
    Operators: ["*", "@", ".matmul", "*"],
    Decorated: ["linear"],
    Hidden: [],
    Super: ["@"],
    Loops: ["*"],
    WithoutGradients: [],
    Exec: [],
}


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_which_calls_are_found(kind):
    """The output is the same, from the same line, and the calls are those of the names; a number is no factor."""
    module, x, found = kind(), torch.rand(4, 4), own_code(kind, CALLS)
    assert [site.name for site in found.sites] == FOUND[kind]
    for name, method in found.methods.items():
        setattr(module, name, method.__get__(module))
        own = kind.__dict__[name]
        assert method.__globals__ is own.__globals__
        assert method.__code__.co_firstlineno == own.__code__.co_firstlineno
        assert (method.__defaults__, method.__kwdefaults__) == (own.__defaults__, own.__kwdefaults__)
    output = module(x)
    assert torch.equal(output, kind.forward(module, x))
    assert {place for _, place in module.calls} <= {2 * i for i in range(len(found.sites))}
    assert bool(module.calls) == bool(found.sites)


def test_what_an_operator_multiplies_is_known():
    sites = own_code(Operators, CALLS).sites
    assert [site.own for site in sites if site.name == "*"] == [("scale", None), ("factor", None)]


def test_code_that_cannot_be_changed_says_why():
    assert own_code(Exec, CALLS).left == {"forward": "could not get source code"}


def test_names_are_looked_up_as_before(monkeypatch):
    """What another library replaces in the module's file later is called."""

    def sine(x):
        return torch.zeros_like(x)

    module = Names()
    module.forward = own_code(Names, CALLS).methods["forward"].__get__(module)
    before = module(torch.ones(4, 4))
    monkeypatch.setattr(torch, "sin", sine)
    assert not torch.equal(module(torch.ones(4, 4)), before)

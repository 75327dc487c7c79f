"""Modules whose class says how it is pickled and copied do so when they are converted, and stay converted."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from rmm_linear import convert, revert
from rmm_linear.layers.converted import ConvertedModule


class Linear(nn.Linear):
    """A linear layer with a cache that is not to be pickled, nor copied."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.cache = lambda: None


class LeavesOut(Linear):
    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "cache"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.cache = "made again"


class OwnFormat(Linear):
    """Of a state that is no dict of attributes."""

    def __getstate__(self):
        return [self.training, *self.state_dict().values()]

    def __setstate__(self, state):
        nn.Module.__init__(self)
        self.training, weight, bias = state
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.out_features, self.in_features = weight.shape
        self.cache = "made again"


class Reduced(Linear):
    def __reduce__(self):
        return type(self), (self.in_features, self.out_features), self.state_dict()

    def __setstate__(self, state):
        self.load_state_dict(state)
        self.cache = "made again"


def rebuilt(sizes, state):
    made = ReducedEx(*sizes)
    made.load_state_dict(state)
    made.cache = "made again"
    return made


class ReducedEx(Linear):
    """Without a state."""

    def __reduce_ex__(self, protocol):
        return rebuilt, ((self.in_features, self.out_features), self.state_dict())


class Norm(nn.LayerNorm):
    """A norm that sets, of a state, attributes that its conversion follows."""

    def __getstate__(self):
        return self.eps, self.state_dict()

    def __setstate__(self, state):
        nn.Module.__init__(self)
        self.normalized_shape, self.elementwise_affine, self.cache = (8,), True, "made again"
        self.eps, tensors = state
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


class Keeps(nn.GELU):
    """One that copies itself."""

    def __deepcopy__(self, memo):
        made = type(self)(self.approximate)
        vars(made).update(vars(self), cache="made again")
        return made


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "protocol 0": lambda model: pickle.loads(pickle.dumps(model, 0)),
}


def gradients(model, x):
    torch.manual_seed(0)
    return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])


KINDS = {LeavesOut: (8, 4), OwnFormat: (8, 4), Reduced: (8, 4), ReducedEx: (8, 4), Norm: (8,)}
CASES = [*itertools.product(KINDS, WAYS), (Keeps, "deepcopy")]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_own_ways_are_kept(kind, way):
    model = nn.Sequential(kind(*KINDS.get(kind, ())))
    convert(model, min_rows=1)
    x = torch.randn(30, 8, requires_grad=True)
    again = nn.Sequential(WAYS[way](model[0])) if way == "copy" else WAYS[way](model)
    made = again[0]
    assert type(made) is type(model[0])
    assert made.cache == "made again"
    assert isinstance(made, ConvertedModule)
    assert made.rmm_config == model[0].rmm_config
    found, expected = (gradients(one, x) for one in (made, model[0]))
    assert all(map(torch.equal, found, expected))
    revert(again)
    assert type(again[0]) is kind
    assert not any(name.startswith("rmm_") for name in vars(again[0]))

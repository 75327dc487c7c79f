"""Modules that call ``F.linear`` with a weight of their own; their gradients are in tests/contracts/test_modules.py."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rmm_linear import convert, sketch_state
from rmm_linear.activations.products import PackedProduct, multiplies
from rmm_linear.memory import track_saved


class Router(nn.Module):
    """Chooses by the product with its weight, in float32."""

    def __init__(self, width=32, experts=4):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(experts, width)), nn.Linear(experts, experts)

    def forward(self, x):
        logits = F.linear(x.flatten(0, -2).type(torch.float32), self.weight.type(torch.float32))
        return self.inner(logits).softmax(-1), logits.topk(2)[1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(32, 32), Router()

    def forward(self, x):
        return self.router(self.first(x) * 2)[0]


def test_what_multiplies():
    class Named(nn.Module):
        def __init__(self, shape, function=None):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))
            self.function = function

        def forward(self, x):
            return F.linear(x, self.weight)

    class Other(Named):
        def forward(self, x):
            return x @ self.weight

    assert multiplies(Named((3, 4)))
    for module in (Named((3, 4, 5)), Named((1, 4)), Named((4,)), Other((3, 4)), nn.Embedding(3, 4)):
        assert not multiplies(module)


def test_a_router_saves_codes_and_chooses_the_same():
    model, x = Model().train(), torch.randn(4, 40, 32)
    exact = model(x)
    with track_saved(model) as before:
        output = model(x)
    report = convert(model, min_rows=1)
    assert isinstance(model.router, PackedProduct)
    assert report.packed["router"].operation == "linear"
    assert torch.equal(model(x), exact)
    with track_saved(model) as after:
        again = model(x)
    assert torch.equal(output, again)
    rows = 4 * 40
    freed = before.by_module["router"] - after.by_module["router"]
    assert freed >= rows * 32 * 4 - (rows * 32 * 3 / 8 + rows + 8)


def test_layers_inside_of_it_are_not_taken_for_it():
    """Excluded, they are exact."""
    model, x = Model().train(), torch.randn(4, 40, 32)
    model(x).square().sum().backward()
    wanted = model.router.inner.weight.grad.clone()
    model.zero_grad()
    convert(model, min_rows=1, exclude_modules=["inner"], operations=("linear",))
    model(x).square().sum().backward()
    assert torch.equal(model.router.inner.weight.grad, wanted)


def test_other_weights_are_not_its_own():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.linear = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x + self.places)

    class Borrowing(Router):
        def forward(self, x):
            return super().forward(x)[0] + F.linear(x, self.inner.weight.sum() * torch.ones(4, 32)).flatten(0, -2)

    assert not multiplies(Table())
    model, x = nn.Sequential(nn.Linear(32, 32), Borrowing()).train(), torch.randn(4, 40, 32)
    model(x).square().sum().backward()
    wanted = model[1].inner.weight.grad.clone()
    model.zero_grad()
    convert(model, min_rows=1, exclude_modules=["0", "inner"], operations=("linear",))
    model(x).square().sum().backward()
    assert torch.equal(model[1].inner.weight.grad, wanted)


@pytest.mark.parametrize(
    ("fields", "is_converted"),
    [({}, True), ({"target_modules": ["first"]}, False), ({"target_modules": ["router"]}, True),
     ({"exclude_modules": ["router"]}, False), ({"operations": ("norm", "activation", "dropout")}, False)],
)  # fmt: skip
def test_it_is_chosen_as_linear_layers_are(fields, is_converted, caplog):
    model = nn.Sequential(Model(), nn.GELU())
    convert(model, **fields)
    assert isinstance(model[0].router, PackedProduct) == is_converted
    assert "matches no linear layer" not in caplog.text


def test_where_nothing_is_trained_nothing_is_saved():
    model, x = Model().train(), torch.randn(4, 40, 32)
    convert(model, min_rows=1)
    model.router.weight.requires_grad_(False)
    model(x).sum().backward()
    assert model.router.weight.grad is None
    model.router.training = False
    model.router.weight.requires_grad_(True)
    model(x).sum().backward()  # in eval mode, it is exact
    assert model.router.weight.grad is not None
    assert sketch_state(model)["layers"] == ["first", "router.inner"]


def test_a_module_without_its_parameters_yet_is_not_one():
    assert not multiplies(nn.LazyLinear(3))

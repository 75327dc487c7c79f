"""Tensors that have no rows of real numbers, of which nothing is coded: sparse, nested and complex ones."""

import pytest
import torch
from module_cases import MEMBERS, WIDTH, converted_model, exact_model
from torch import nn

from rmm_linear import RMMConfig, convert, sketched_linear

LENGTHS = (5, 3)


def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, WIDTH, generator=generator) for length in LENGTHS]


LAYOUTS = {
    "coo": lambda: torch.cat(matrices()).relu().to_sparse(),
    "csr": lambda: torch.cat(matrices()).relu().to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor(matrices(), layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor(matrices()),
}


def dense(tensor):
    if tensor.is_nested:
        return torch.cat([one.detach() for one in tensor.unbind()])
    return tensor.detach().to_dense()


def step(module, x):
    """Output and gradients; None where the module does not take it."""
    leaves = [x.requires_grad_(), *module.parameters()]
    torch.manual_seed(0)
    try:
        output = module(x)
        values = output.values() if output.layout is torch.jagged else output
        (torch.cat(values.unbind()) if values.is_nested else values.to_dense()).square().sum().backward()
    except Exception:
        return None
    return [output, *(leaf.grad for leaf in leaves)]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in MEMBERS if "bits" not in name and "blocks" not in name])
def test_modules_that_take_it_are_exact(name, layout):
    found, expected = (step(make(name).module, LAYOUTS[layout]()) for make in (converted_model, exact_model))
    if expected is None:
        return
    assert found is not None
    assert all(torch.equal(dense(one), dense(other)) for one, other in zip(found, expected, strict=True))


class Square(nn.Module):
    def forward(self, x):
        return x * x


def test_complex_numbers_are_exact():
    model, x = nn.Sequential(Square()), torch.randn(20, 8, dtype=torch.complex64, requires_grad=True)
    convert(model, min_rows=1)
    weight = torch.randn(4, 8, dtype=torch.complex64, requires_grad=True)
    linear = lambda x: sketched_linear(x, weight, config=RMMConfig(min_rows=1))  # noqa: E731
    for pair in (model, Square()), (linear, lambda x: x @ weight.T):
        found, expected = (torch.autograd.grad(run(x).abs().sum(), (x, weight), allow_unused=True) for run in pair)
        assert all(one is other or torch.allclose(one, other) for one, other in zip(found, expected, strict=True))

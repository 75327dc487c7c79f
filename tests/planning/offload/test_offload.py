"""Offloaded blocks: gradients to the bit, and memory that falls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_helpers import (
    SAVED,
    TOKENS,
    WIDE,
    Deep,
    Transformer,
    detach,
    files,
    gradients,
    measured_now,
    offloaded,
    same,
    step,
)
from planning_graph_helpers import real_peak
from torch import Tensor, nn

from rmm_linear.memory.peak import peak
from rmm_linear.planning import simulate
from rmm_linear.planning.blocks.recompute import Recomputed


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    gc.collect()
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("chosen", [slice(None), slice(0, None, 2), slice(1, 2)])
def test_gradients_are_those_of_the_plain_model(chosen: slice, tmp_path: Path) -> None:
    model = Transformer(0.2)
    expected = step(model)
    attached = offloaded([*model.blocks[chosen]], tmp_path)
    assert same(step(model), expected)
    detach(attached)
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert same(step(model), expected)


def test_autocast_and_recomputed_blocks_beside_offloaded_ones(tmp_path: Path) -> None:
    model = Transformer(0.2)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS)
        loss.backward()

    expected = gradients(model, run)
    attached: list[Any] = offloaded([*model.blocks[::2]], tmp_path)
    attached += [Recomputed(block) for block in model.blocks[1::2]]
    for each in attached[2:]:
        each.attach()
    assert same(gradients(model, run), expected)
    detach(attached)


def test_the_peak_falls_and_is_the_simulated_one(tmp_path: Path) -> None:
    model = Deep()
    plain = real_peak(model, WIDE)
    attached = offloaded([*model], tmp_path)
    found = real_peak(model, WIDE)
    size = WIDE.numel() * WIDE.element_size()
    # Two blocks are back at most, and temporary results: nothing in it grows with the number of blocks.
    activations = found - sum(4 * parameter.numel() for parameter in model.parameters())
    assert activations <= (2 * SAVED + 4) * size
    assert plain - found >= (6 - 4) * (SAVED - 1) * size
    assert simulate(model, WIDE).bytes == found
    assert real_peak(model, WIDE) == found
    detach(attached)
    assert simulate(model, WIDE).bytes == plain


@pytest.mark.parametrize("chosen", [slice(None), slice(0, None, 2)])
def test_the_simulated_peak_of_a_transformer(chosen: slice, tmp_path: Path) -> None:
    model = Transformer(0.2)
    plain = real_peak(model, TOKENS)
    attached = offloaded([*model.blocks[chosen]], tmp_path)
    assert simulate(model, TOKENS).bytes == real_peak(model, TOKENS) < plain
    detach(attached)


def test_a_simulation_makes_no_folder(tmp_path: Path) -> None:
    model = Deep()
    attached = offloaded([*model], tmp_path / "not-there")
    simulate(model, WIDE)
    assert not (tmp_path / "not-there").exists()
    detach(attached)


def test_a_storage_is_copied_once_however_many_views_are_saved(tmp_path: Path) -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.5
            rows, turned = x[100:300], x.t()
            return (rows.exp() @ turned).square().sum() + x.square().sum() + rows.square().sum()

    model, x = Views(), WIDE.clone().requires_grad_()
    expected = torch.autograd.grad(model(x), x)
    attached = offloaded([model], tmp_path)
    output = model(x)
    sizes = sorted(path.stat().st_size // 1024 for path in files(tmp_path))
    assert sizes == [128, 200 * 512 * 4 // 1024]  # x, and the exponential of its rows
    assert same(torch.autograd.grad(output, x), expected)
    del output
    detach(attached)


def test_bits_strides_and_dtypes_come_back(tmp_path: Path) -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = torch.complex(x, 1 - x) * (1 + 2j)
            turned = z.conj().t()
            product = (turned @ z).abs().sum() + (turned.imag * turned.real).sum()
            return product + (z[::2, 1::3] * z.conj()[::2, 1::3]).real.square().sum()

    model, x = Complex(), WIDE.clone().requires_grad_()
    expected = torch.autograd.grad(model(x), x)
    attached = offloaded([model], tmp_path)
    output = model(x)
    assert files(tmp_path)
    assert same(torch.autograd.grad(output, x), expected)
    del output
    detach(attached)


def test_parameters_buffers_and_small_tensors_stay(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.register_buffer("table", WIDE.clone())
            self.weight = [weight]  # of another module

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.table).sum(0) @ self.weight[0].t()

    model = Table(nn.Parameter(torch.randn(600, 64)))
    attached = offloaded([model], tmp_path)
    x = torch.randn(64, requires_grad=True)
    output = model(x)
    assert files(tmp_path) == []
    output.sum().backward()
    assert x.grad is not None
    detach(attached)


def test_a_retained_graph_runs_again_and_in_parts(tmp_path: Path) -> None:
    model = Deep(4)
    parameters = [*model.parameters()]

    def parts() -> tuple[Tensor, Tensor]:
        half = model[1](model[0](WIDE))
        return half.sum(), model[3](model[2](half)).square().sum()

    first, second = parts()
    expected = [torch.autograd.grad(second, parameters, retain_graph=True) for _ in range(2)]
    last = parameters[-2:]
    early = parameters[: len(parameters) // 2]
    of_last = torch.autograd.grad(second, last, retain_graph=True)
    of_early = torch.autograd.grad(first, early, retain_graph=True)
    attached = offloaded([*model], tmp_path)
    found, late = parts()
    assert same(torch.autograd.grad(late, last, retain_graph=True), of_last)
    for each in expected:
        assert same(torch.autograd.grad(late, parameters, retain_graph=True), each)
    # Early blocks first, and then all of them.
    assert same(torch.autograd.grad(found, early, retain_graph=True), of_early)
    assert files(tmp_path)
    assert same(torch.autograd.grad(late, parameters), expected[0])
    assert files(tmp_path) == []  # though the graph itself is there
    del found, late
    detach(attached)


def test_what_a_part_of_a_backward_pass_fetched_is_freed_with_it(tmp_path: Path) -> None:
    model = Deep(3)
    attached = offloaded([*model], tmp_path)
    with peak("cpu") as measured:
        half = model[1](model[0](WIDE))
        loss = model[2](half).sum()
        before = measured_now(measured)
        gradient = torch.autograd.grad(loss, half, retain_graph=True)
        del gradient
        assert measured_now(measured) == before
    del loss, half
    detach(attached)


def test_second_derivatives(tmp_path: Path) -> None:
    model, x = Deep(2), WIDE.clone().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, *model.parameters()], allow_unused=True)[:3]

    expected = run()
    attached = offloaded([*model], tmp_path)
    assert same(run(), expected)
    detach(attached)


def test_a_custom_function_may_ask_twice(tmp_path: Path) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * ctx.saved_tensors[0] + gradient * ctx.saved_tensors[0]

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(Square.apply(x).sin())  # pyright: ignore[reportReturnType]

    model, x = Twice(), WIDE.clone().requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), x)
    attached = offloaded([model], tmp_path)
    assert same(torch.autograd.grad(model(x).sum(), x), expected)
    detach(attached)


def test_a_node_that_is_looked_at(tmp_path: Path) -> None:
    attached = offloaded([model := nn.Tanh()], tmp_path)
    output: Any = model(WIDE.clone().requires_grad_())
    assert torch.equal(output.grad_fn._saved_result, output)
    del output
    detach(attached)

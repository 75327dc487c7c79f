"""Offloaded blocks: gradients to the bit, memory that falls, nothing left of graphs, files and processes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
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
from rmm_linear.planning.offload.chain import OffloadChain, Offloaded


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    gc.collect()
    assert list(tmp_path.rglob("*")) == []


def test_autocast_recomputed_and_plain_blocks_next_to_offloaded_ones(tmp_path: Path) -> None:
    model = Transformer(0.2)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS)
        loss.backward()

    expected = gradients(model, run)
    attached: list[Any] = [*offloaded([*model.blocks[::2]], tmp_path), Recomputed(model.blocks[1])]
    attached[-1].attach()
    assert same(gradients(model, run), expected)
    detach(attached)
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert same(gradients(model, run), expected)


def test_the_peak_falls_and_is_the_simulated_one(tmp_path: Path) -> None:
    model = Deep()
    plain = real_peak(model, WIDE)
    attached = offloaded([*model], tmp_path / "states")
    found = simulate(model, WIDE).bytes
    assert not (tmp_path / "states").exists()
    assert real_peak(model, WIDE) == found
    size = WIDE.numel() * WIDE.element_size()
    # Two blocks are back at most, and temporary results: nothing in it grows with the number of blocks.
    activations = found - sum(4 * parameter.numel() for parameter in model.parameters())
    assert activations <= (2 * SAVED + 4) * size
    assert plain - found >= (6 - 4) * (SAVED - 1) * size
    assert real_peak(model, WIDE) == found
    detach(attached)
    (tmp_path / "states").rmdir()
    assert simulate(model, WIDE).bytes == plain


@pytest.mark.one_of(2)
@pytest.mark.parametrize("chosen", [slice(None), slice(0, None, 2)])
def test_the_simulated_peak_of_a_transformer(chosen: slice, tmp_path: Path) -> None:
    model = Transformer(0.2)
    plain = real_peak(model, TOKENS)
    attached = offloaded([*model.blocks[chosen]], tmp_path)
    assert simulate(model, TOKENS).bytes == real_peak(model, TOKENS) < plain
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


def test_what_a_block_saves_in_all_calls_of_a_step_is_counted(tmp_path: Path) -> None:
    model = Deep(1)
    (waiting, *_), x = offloaded([*model], tmp_path), WIDE.clone().requires_grad_()
    for times in (1, 3, 3, 2):
        output = x
        for _ in range(times):
            output = model(output)
        output.sum().backward()
        assert waiting.copied == times * SAVED * WIDE.numel() * 4
    del output
    detach([waiting])


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


def test_what_a_part_of_a_graph_saved_goes_with_it(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.exp(), x.tanh()

    model, x = Two(), WIDE.clone().requires_grad_()
    attached = offloaded([model], tmp_path)
    first, second = model(x)
    assert len(files(tmp_path)) == 2
    del first
    assert len(files(tmp_path)) == 1
    second.sum().backward()
    del second
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


def test_a_custom_function_may_ask_twice_and_a_node_is_read_by_a_user(tmp_path: Path) -> None:
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
            return torch.tanh(Square.apply(Square.apply(x).sin()))  # pyright: ignore[reportArgumentType]

    model, x = Twice(), WIDE.clone().requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), x)
    attached = offloaded([model], tmp_path)
    output: Any = model(x)
    assert torch.equal(output.grad_fn._saved_result, output)
    assert same(torch.autograd.grad(output.sum(), x), expected)
    del output
    detach(attached)


# Faults, and what is left


def test_a_graph_that_is_dropped_takes_all_with_it_without_a_collection(tmp_path: Path) -> None:
    """Also tensors that stay: a hook that returned them with their graph would make a cycle."""
    model = Deep(3)
    attached = offloaded([*model], tmp_path)
    gc.collect()
    gc.disable()
    try:
        for example in (WIDE, WIDE[:8]):
            with peak("cpu") as measured:
                given = weakref.ref(storage := example.clone().untyped_storage())
                output = model(torch.empty(0).set_(storage, 0, example.shape))
                del storage
                assert len(files(tmp_path)) == (3 * SAVED if example is WIDE else 0)
                assert (given() is None) == (example is WIDE)  # it is in a file
                del output
                assert files(tmp_path) == []
                assert measured_now(measured) == 0
    finally:
        gc.enable()
    detach(attached)


def test_an_error_in_the_backward_pass_leaves_nothing(tmp_path: Path) -> None:
    model = Deep(4)
    expected = step(model, WIDE)
    attached = offloaded([*model], tmp_path)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("here")

    with peak("cpu") as measured:
        half: Any = model[1](model[0](WIDE))
        half.register_hook(fail)
        loss = model[3](model[2](half)).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert files(tmp_path)
        del half, loss
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert measured_now(measured) == 0
    assert files(tmp_path) == []
    assert same(step(model, WIDE), expected)
    detach(attached)


def test_without_gradients_nothing_is_done(tmp_path: Path) -> None:
    model = Deep(2)
    expected = model(WIDE)
    attached = offloaded([*model], tmp_path / "not-there")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(model(WIDE), expected)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(WIDE)
    assert not (tmp_path / "not-there").exists()
    detach(attached)


@pytest.mark.parametrize("large", [True, False])
def test_a_change_in_place_is_the_error_that_it_is(large: bool, tmp_path: Path) -> None:
    x = (WIDE if large else WIDE[:2].clone()).clone().requires_grad_()
    model = nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True))
    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    attached = offloaded([model], tmp_path)
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    detach(attached)
    attached = offloaded([model[0]], tmp_path)  # changed after the block has ended
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    detach(attached)
    gc.collect()


def test_the_cpu_needs_a_folder() -> None:
    block = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"the CPU's memory is where it would go\. Give folder="):
        Offloaded(block, OffloadChain()).attach()
    assert "forward" not in block.__dict__
    assert block(torch.ones(2)).shape == (2,)


def test_copies_of_the_model_are_offloaded_too(tmp_path: Path) -> None:
    model = Transformer(0.2)
    expected = step(model)
    attached = offloaded([*model.blocks], tmp_path)
    loss = model(TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other_chains = {id(block.forward.chain) for block in other.blocks}
        assert len(other_chains) == 1
        assert other_chains != {id(model.blocks[0].forward.chain)}
        assert other.blocks[0].forward.module is other.blocks[0]
        assert same(step(other), expected)
        assert len(list(tmp_path.glob("rmm-*.lock"))) > 1
    del other
    gc.collect()
    loss.backward()
    del loss
    detach(attached)

"""Modules that are tiled in tests, and what their steps leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.memory.peak import peak
from rmm_linear.planning.tiles.tile import Tile

WIDTH, INNER = 32, 96


class Gated(nn.Module):
    """A gated MLP with dropout, and a buffer."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, p: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner)
        self.down, self.drop = nn.Linear(inner, width), nn.Dropout(p)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.silu(self.gate(x)) * self.up(x))) * self.scale


class Block(nn.Module):
    """A norm, a layer that mixes positions, and an MLP."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Gated(p=p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x + self.mix(self.norm(x)).mean(1, keepdim=True))


class Stack(nn.Module):
    """Several blocks."""

    def __init__(self, blocks: int = 2, p: float = 0.0) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block(p) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@contextmanager
def tiled(module: nn.Module, rows: int = 128, method: str = "forward") -> Iterator[Tile]:
    one = Tile(module, rows, method)
    one.attach()
    try:
        yield one
    finally:
        one.detach()


def step(
    module: nn.Module,
    *inputs: Tensor,
    needs: bool = True,
    run: Callable[..., Tensor] | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Run a step; return the output, and the gradients of inputs and parameters."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    given = [one.detach().clone().requires_grad_(needs and one.is_floating_point()) for one in inputs]
    output = (module if run is None else run)(*given)
    output.backward((torch.arange(output.numel()).view(output.shape) * 12.99).sin().to(output.dtype))
    found = [output.detach(), *(one.grad for one in given), *(one.grad for one in module.parameters())]
    return [one.clone() for one in found if one is not None]


def error(found: Tensor, expected: Tensor) -> float:
    """The error of a tensor, relative to its norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def beyond(module: nn.Module, x: Tensor) -> float:
    """Bytes at the peak beyond output and gradients, in units of the input."""
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    with peak("cpu") as measured:
        output = module(x)
        output.backward(torch.ones(()).expand_as(output))
    gradients = sum(one.grad.nbytes for one in (x, *module.parameters()) if one.grad is not None)
    return (measured.bytes - output.nbytes - gradients) / x.nbytes


def same(found: list[Tensor], expected: list[Tensor], exact: int = 2, limit: float = 1e-5) -> bool:
    """Say whether the first tensors are the same to the bit, and the others to the rounding of sums in float32."""
    bits = all(map(torch.equal, found[:exact], expected[:exact]))
    return (
        bits and len(found) == len(expected) and all(error(a, b) < limit for a, b in zip(found, expected, strict=True))
    )

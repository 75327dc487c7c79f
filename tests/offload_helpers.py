"""What the tests of offloaded blocks share: networks, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear.planning.offload.chain import OffloadChain, Offloaded
from rmm_linear.planning.step.step import run_step


class Layer(nn.Module):
    """Attention and an MLP, with keyword arguments and a nested output."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(inplace=True), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, *, scale: float) -> tuple[dict[str, Tensor], Tensor]:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        weights = (q @ k.transpose(-1, -2) * scale).softmax(-1)
        x = x + self.out((self.drop(weights) @ v).transpose(1, 2).flatten(2))
        x = x + self.drop(self.mlp(self.norm2(x)))
        return {"x": x}, x.mean()


class Transformer(nn.Module):
    """The embedding is the head's weight too, and one block's."""

    def __init__(self, p: float = 0.0, blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(600, width)  # larger than what is not offloaded
        self.blocks = nn.ModuleList(Layer(width, p) for _ in range(blocks))
        self.head = nn.Linear(width, 600, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x, mean = self.embedding(tokens), 0.0
        for block in self.blocks:
            inner, more = block(x, scale=0.3)
            x, mean = inner["x"], mean + more
        return self.head(x).logsumexp(-1).mean() + mean


TOKENS = torch.arange(8 * 48).reshape(8, 48) % 600


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rmm-*/*"))


def offloaded(modules: Sequence[nn.Module], folder: Path | None) -> list[Offloaded]:
    chain = OffloadChain(folder)
    attached = [Offloaded(module, chain) for module in modules]
    for each in attached:
        each.attach()
    return attached


def detach(attached: list[Offloaded]) -> None:
    while attached:
        attached.pop().detach()


def gradients(model: nn.Module, run: Callable[[], Any]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    run()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def step(model: nn.Module, example: Any = TOKENS) -> list[Tensor]:
    return gradients(model, lambda: run_step(model, example))


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


class Deep(nn.Sequential):
    """Blocks of products only, so that what they save is known."""

    def __init__(self, blocks: int = 6, layers: int = 3, width: int = 64) -> None:
        super().__init__(
            *(
                nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))
                for _ in range(blocks)
            )
        )


WIDE = torch.linspace(-1, 1, 512 * 64).reshape(512, 64)  # 128 KiB
SAVED = 4  # storages of a block of Deep: its input, and what each Tanh returns


def measured_now(measured: Any) -> int:
    modes = [mode for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack() if hasattr(mode, "now")]
    assert modes[-1].result is measured
    return modes[-1].now

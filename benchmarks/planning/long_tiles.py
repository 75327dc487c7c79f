"""What one module takes as a whole and in tiles, by the length of the sequence; Liger's tiled MLP too, if it is there.

Working set: the peak of a step without input, output, their gradients and those of parameters.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from benchmarks import library
from benchmarks.planning import fit_steps
from benchmarks.records import Origin
from benchmarks.timing import interleaved, quartiles
from rmm_linear.memory import peak

WIDTH, WIDER, SLICE = 64, 8, 128
LENGTHS = (512, 1024, 2048, 4096, 8192)
WHOLE, TILED, LIGER = "whole", "tiled", "liger-kernel"


@dataclass(frozen=True, kw_only=True)
class Working(Origin):
    """One module at one length."""

    module: str  # "MLP" or "norm"
    length: int  # tokens
    provider: str
    working: int = 0  # bytes of the working set
    tensors: float = 0.0  # the same in tensors of the input's size
    seconds: float = 0.0  # median of a step
    error: float = 0.0  # largest relative error of the output and the input's gradient, by the whole module's
    weight_error: float = 0.0  # the same of parameters
    seed: int = fit_steps.SEED


Call = Callable[[Tensor], Any]


def working(about: Mapping[str, Any], *, tiny: bool = False) -> list[Working]:
    lengths, rounds = (LENGTHS[:1], 1) if tiny else (LENGTHS, fit_steps.ROUNDS)
    return [
        Working(module=name, length=length, **row, **about)
        for name, module in _modules().items()
        for length in lengths
        for row in _compared(module, length, rounds)
    ]


def _compared(module: nn.Module, length: int, rounds: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(fit_steps.SEED)
    x, gradient = torch.randn(1, length, WIDTH, requires_grad=True), torch.randn(1, length, WIDTH)
    calls = dict(_providers(module))
    runs = {key: functools.partial(_step, module, call, x, gradient) for key, call in calls.items()}
    expected, times = runs[WHOLE](), interleaved(runs, "cpu", rounds)
    for provider, call in calls.items():
        size, found = _working_set(module, call, x, gradient), runs[provider]()
        yield {
            "provider": provider,
            "working": size,
            "tensors": size / (x.numel() * x.element_size()),
            "seconds": quartiles(times[provider])[1],
            "error": _error(found[:2], expected[:2]),
            "weight_error": _error(found[2:], expected[2:]),
        }


def _modules() -> dict[str, nn.Module]:
    torch.manual_seed(fit_steps.SEED)
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDER * WIDTH)
    return {"MLP": LlamaMLP(config), "norm": LlamaRMSNorm(WIDTH)}


def _providers(module: nn.Module) -> Iterator[tuple[str, Call]]:
    yield WHOLE, module

    def tiled(x: Tensor) -> Any:
        one = library.Tile(module, SLICE)
        one.attach()
        try:
            return module(x)
        finally:
            one.detach()

    yield TILED, tiled
    try:
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    if isinstance(module, LlamaMLP):
        yield (
            LIGER,
            lambda x: apply_tiled_mlp(
                lambda mlp, part: type(mlp).forward(mlp, part),
                module,
                x,
                -(-x.shape[1] // SLICE),
                [*module.parameters()],
            ),
        )


def _step(module: nn.Module, call: Call, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x.grad = None
    fit_steps.clear(module)
    output = call(x)
    output.backward(gradient)
    found: list[Any] = [output.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]
    x.grad = None
    fit_steps.clear(module)
    return found


def _working_set(module: nn.Module, call: Call, x: Tensor, gradient: Tensor) -> int:
    x.grad = None
    fit_steps.clear(module)
    gc.collect()
    with peak("cpu") as measured:
        call(x).backward(gradient)
    # Output and the input's gradient are made in the step; input and the output's gradient were there before.
    own = 2 * x.numel() * x.element_size() + sum(one.numel() * one.element_size() for one in module.parameters())
    return measured.bytes - own


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True))

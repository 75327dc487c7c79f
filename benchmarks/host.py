"""Suite ``host``: what one call of a layer costs beside its arithmetic, which is next to nothing here.

Forward and backward pass of twelve layers of 16 -> 16 on 64 tokens, in one thread: nn.Linear, and the same model
converted. Tables divide by the layers, so that a figure is one layer's call inside of a model, with its share of what
the conversion does once per call of the model.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from benchmarks.case import Case, Outcome, Setup
from rmm_linear import RMMConfig, convert

REFERENCE = "nn.Linear"
THREADS = 1  # more would wait for each other
TOKENS, WIDTH, LAYERS = 64, 16, 12


def cases(device: str, *, tiny: bool) -> list[Case]:
    """Return the suite's case."""
    layers = 2 if tiny else LAYERS
    return [
        Case(
            "host",
            f"{layers} layers of {WIDTH} -> {WIDTH}, {TOKENS} tokens",
            device,
            "float32",
            (TOKENS, WIDTH, layers),
            check=TOKENS,
            rounds=2 if tiny else 60,
            tiny=tiny,
        )
    ]


def configs(case: Case) -> dict[str, RMMConfig]:
    """Return the providers that are sketched. The default would keep all rows of so few tokens."""
    return {
        "countsketch": RMMConfig(kind="countsketch", ratio=case.ratio, bits=None, min_rows=1),
        "countsketch 4 bits": RMMConfig(memory=case.ratio, bits=4, min_rows=1),
        "rows": RMMConfig(kind="rows", ratio=case.ratio, bits=None, min_rows=1),
    }


def providers(case: Case) -> list[str]:
    """Return the titles of the providers, the reference first."""
    return [REFERENCE, *configs(case)]


def setup(case: Case, provider: str) -> Setup:
    """Make a provider ready to run forward and backward pass."""
    model, (x, y) = _model(case, provider), _inputs(case)
    leaves = [x, *model.parameters()]

    def forward() -> Tensor:
        return model(x)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(y)

    def outcome(seed: int) -> Outcome:
        torch.manual_seed(seed)
        return _outcome(model, *_inputs(case))

    return Setup(run, outcome, lambda seed: _expected(case), model, forward)


def _model(case: Case, provider: str) -> nn.Module:
    _, width, layers = case.sizes
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(width, width, device=case.device) for _ in range(layers)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)  # pyright: ignore[reportArgumentType]  # gradients of the same size
    if provider != REFERENCE:
        convert(model, configs(case)[provider])
    return model.train()


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    """X, which wants its gradient, and Y."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(case.sizes[:2], generator=generator).to(case.device) for _ in range(2))
    return x.requires_grad_(), y


def _outcome(model: nn.Module, x: Tensor, y: Tensor) -> Outcome:
    output = model(x)
    parameters = list(model.parameters())
    x_gradient, *gradients = torch.autograd.grad(output, (x, *parameters), y)
    found = {"output": output.detach(), "dX": x_gradient}
    found["gradients with respect to biases"] = torch.cat([one for one in gradients if one.dim() == 1])
    return Outcome(found, [one for one in gradients if one.dim() == 2])


@functools.lru_cache(maxsize=1)
def _expected(case: Case) -> Outcome:
    return _outcome(_model(case, REFERENCE), *_inputs(case))

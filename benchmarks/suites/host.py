"""Suite ``host``: what one call of a module costs beside its arithmetic, which is next to nothing here.

Forward and backward pass of twelve modules of 16 columns on 64 tokens, in one thread: PyTorch's own, and the same
converted. So are the blocks of a RoBERTa and a LLaMA of that width, with all operations converted. Tables divide by the
modules, so that a figure is the call of one inside of a model, with its share of what the conversion does once per call
of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.records import Row
from benchmarks.suites.case import Case, Outcome, Setup
from benchmarks.suites.models import build
from rmm_linear import RMMConfig, convert

REFERENCE = "exact"
THREADS = 1  # more would wait for each other
TOKENS, WIDTH, LAYERS, SEQUENCES = 64, 16, 12, 2
_SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_attention_heads": 1}


class Attention(nn.Module):
    """Attention alone, by which the conversion is told from its surroundings."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Attend; shape (N, I) of two sequences."""
        q = x.view(SEQUENCES, -1, 1, x.shape[1]).transpose(1, 2)
        p = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, q, q, dropout_p=p).transpose(1, 2).reshape(x.shape)


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _linear() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    nn.init.orthogonal_(layer.weight)  # gradients of the same size
    return layer


@dataclass(frozen=True)
class Module:
    make: Callable[..., nn.Module]  # makes one module, or with ``is_model`` a model of some layers
    configs: dict[str, dict[str, Any]]  # by the title of a provider
    is_model: bool = False  # whether it is a whole model of transformers


_PACKED = {"converted": {}}
MODULES = {
    "linear layers": Module(
        _linear,
        {
            "countsketch": {"kind": "countsketch", "ratio": 0.1, "bits": None},
            "countsketch 4 bits": {"memory": 0.1, "bits": 4},
            "rows": {"kind": "rows", "ratio": 0.1, "bits": None},
        },
    ),
    "GELU": Module(nn.GELU, _PACKED),
    "LayerNorm": Module(lambda: nn.LayerNorm(WIDTH), _PACKED),
    "dropout": Module(lambda: nn.Dropout(0.1), _PACKED),
    "attention": Module(Attention, _PACKED),
    "attention with dropout": Module(lambda: Attention(0.1), _PACKED),
    "gated MLPs, activation": Module(GatedMLP, {"converted": {"operations": ["activation"]}}),
    "RoBERTa blocks": Module(partial(build, "Roberta", "Model", vocab_size=64, **_SIZES), _PACKED, is_model=True),
    "LLaMA blocks": Module(partial(build, "Llama", "Model", vocab_size=64, **_SIZES), _PACKED, is_model=True),
}


def cases(device: str, *, tiny: bool) -> list[Case]:
    layers = 2 if tiny else LAYERS
    return [
        Case(
            "host", f"{layers} {title}", device, "float32", (TOKENS, WIDTH, layers),
            check=TOKENS, rounds=2 if tiny else 60, tiny=tiny,
        )
        for title in MODULES
    ]  # fmt: skip


def _of(case: Case) -> Module:
    return MODULES[case.name.partition(" ")[2]]


def providers(case: Case) -> list[str]:
    return [REFERENCE, *_of(case).configs]


def setup(case: Case, provider: str) -> Setup:
    model, (x, y) = _made(case, provider), _inputs(case)
    leaves = [*model.parameters(), *([] if _of(case).is_model else [x])]

    def forward() -> Tensor:
        return model(x)

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(y)

    def outcome(seed: int, provider: str = provider) -> Outcome:
        torch.manual_seed(seed)
        return _outcome(_made(case, provider), case)

    return Setup(run, outcome, lambda seed: outcome(seed, REFERENCE), model, forward)


class _Model(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, attention_mask=torch.ones_like(ids))[0]


def _made(case: Case, provider: str) -> nn.Module:
    module, layers = _of(case), case.sizes[2]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    made = module.make(num_hidden_layers=layers) if module.is_model else None
    model = nn.Sequential(*(module.make() for _ in range(layers))) if made is None else made
    torch.set_rng_state(state)
    model = model.to(case.device)
    if provider != REFERENCE:
        convert(model, RMMConfig(min_rows=1, **module.configs[provider]))
    return (_Model(model) if module.is_model else model).train()


def _inputs(case: Case) -> tuple[Tensor, Tensor]:
    """X, which wants its gradient, or ids; and Y."""
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(case.sizes[:2], generator=generator).to(case.device) for _ in range(2))
    if not _of(case).is_model:
        return x.requires_grad_(), y
    ids = torch.randint(3, 60, (SEQUENCES, TOKENS // SEQUENCES), generator=generator).to(case.device)
    return ids, y.view(SEQUENCES, -1, WIDTH)


def _outcome(model: nn.Module, case: Case) -> Outcome:
    """Of linear layers the gradients too; those of other modules are the matter of the suite ``operators``."""
    x, y = _inputs(case)
    output = model(x)
    if not isinstance(model[0] if isinstance(model, nn.Sequential) else model, nn.Linear):
        return Outcome({"output": output.detach()}, [])
    parameters = list(model.parameters())
    x_gradient, *gradients = torch.autograd.grad(output, (x, *parameters), y)
    found = {"output": output.detach(), "dX": x_gradient}
    found["gradients with respect to biases"] = torch.cat([one for one in gradients if one.dim() == 1])
    return Outcome(found, [one for one in gradients if one.dim() == 2])


def per_layer(row: Row) -> float:
    """Return the median time of one layer in microseconds, of a case "n layers of ..."."""
    return (row.median or 0.0) / int(row.case.split()[0]) * 1e6

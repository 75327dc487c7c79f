"""The methods that are compared: what each does to a model before it trains."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frontier.adapters import quantize, sketched_lora
from benchmarks.frontier.compiled import use_compiled
from benchmarks.frontier.few_bits import use_few_bits
from benchmarks.frontier.gact import use_gact
from benchmarks.frontier.loract import use_loract
from benchmarks.frontier.offloaded import use_offloaded
from benchmarks.frontier.prac import use_prac
from benchmarks.library import CacheEntry, SketchCache
from benchmarks.suites.models import checkpoint
from benchmarks.suites.paper import HEAD, use_paper
from rmm_linear import RMMConfig, RMMLinear, convert
from rmm_linear.config import OPERATIONS, QUALITIES
from rmm_linear.planning import load_plan

EXACT = "exact"
NUDGED = "nudged"  # exact, from other weights by a millionth: how far apart equal runs end
LEARNING_RATE, LORA_LEARNING_RATE = 1e-4, 1e-3
_RANK = 16


@dataclass(frozen=True)
class Method:
    title: str  # as tables show it
    group: str  # "exact", "published", "fewer parameters" or "ours"
    change: Callable[..., nn.Module | None]  # changes a model in place, or wraps it and returns what trains
    fields: Mapping[str, Any] = field(default_factory=dict)  # its arguments besides the model
    learning_rate: float = LEARNING_RATE  # of AdamW
    # whether gradients are the exact model's, but for the order of sums, so that nothing has to be trained again
    is_exact: bool = False
    is_compiled: bool = False  # whether torch.compile makes the step, which hides its operators
    is_indexed: bool = False  # whether the model takes the numbers of the examples
    is_tuned: bool = True  # whether it is fine-tuned on GLUE; otherwise it is in studies alone
    budget: float | None = None  # of a plan: the share of what the exact step's peak has above the least of any plan

    def prepare(self, model: nn.Module, plan: Path | None = None) -> nn.Module:
        if self.budget is None:
            return self.change(model, **self.fields) or model
        load_plan(self._there(plan)).apply(model)
        return model

    def settings(self, plan: Path | None = None) -> str:
        """Write what a run is trained with, besides the columns of its row: another text, another run."""
        if self.budget is None:
            return json.dumps(dict(self.fields), sort_keys=True)
        return f"plan {hashlib.sha256(self._there(plan).read_bytes()).hexdigest()[:12]}"

    def _there(self, plan: Path | None) -> Path:
        if plan is None or not plan.is_file():
            raise ValueError(f"{self.title} needs a plan, and there is no {plan}. Run part cost first, which makes it.")
        return plan


def _converted(model: nn.Module, **fields: Any) -> nn.Module:
    convert(model, RMMConfig(**fields))
    return model


class _OwnSketches(SketchCache):
    """Shares nothing: published layers that read the same input keep a sketch each."""

    def entry(self, source: Tensor, weight: Tensor | None, key: Any, index: int) -> CacheEntry:
        return CacheEntry(weakref.ref(source), source._version, [index])


def _wta(model: nn.Module, **fields: Any) -> nn.Module:
    context = next(one.rmm_context for one in _converted(model, **fields).modules() if isinstance(one, RMMLinear))
    if context is not None:
        context.sketch_cache = _OwnSketches()
    return model


@torch.no_grad()
def _nudge(model: nn.Module, *, by: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for one in model.parameters():
        one.mul_(1 + by * torch.randn(one.shape, generator=generator))


def _loract(model: nn.Module, *, rank: int) -> nn.Module:
    adapted = _lora(model, rank=rank)
    use_loract(adapted)
    return adapted


def _lora(model: nn.Module, *, rank: int, groups: int | None = None) -> nn.Module:
    import peft

    settings: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    if groups is not None:
        settings["velora_config"] = peft.VeloraConfig(num_groups=groups)
    kind = "SEQ_CLS" if hasattr(model, HEAD) else None
    return peft.get_peft_model(model, peft.LoraConfig(task_type=kind, **settings))  # pyright: ignore[reportArgumentType]


# All linear layers but those of the head, which see one row per sequence.
_PUBLISHED = {"operations": ("linear",), "mask_padding": False, "bits": None, "min_rows": 1}
_PUBLISHED |= {"exclude_modules": rf"(.*\.)?{HEAD}(\..*)?"}
_WTA = {"kind": "wta", "norm_estimator": "sample_cache", "uniform_mix": 1e-6, **_PUBLISHED}
_DEFAULT = {"bits": 3, "activation_bits": 4, "norm_bits": 3}  # as RMMConfig() has them


# The default of some operations alone.
PARTS = {
    "tenth-linears": ("ours, default, linear layers alone", ("linear",)),
    "tenth-others": ("ours, default, all but linear layers", tuple(one for one in OPERATIONS if one != "linear")),
}


def _dense(share: int) -> Method:
    """The same sketch by our layers, whose noise can be measured."""
    fields = {"kind": "gaussian", "ratio": share / 100, **_PUBLISHED}
    return Method(f"Gaussian sketch by our layers, {share} %", "published", _converted, fields, is_tuned=False)


def _adapters(title: str, change: Callable[..., nn.Module], **fields: Any) -> Method:
    return Method(title, "fewer parameters", change, {"rank": _RANK, **fields}, LORA_LEARNING_RATE)


def _adapt(model: nn.Module, rank: int, *, is_quantized: bool = False, quality: str | None = None) -> nn.Module:
    if is_quantized:
        quantize(model)
    made = _lora(model, rank=rank)
    return made if quality is None else _converted(made, **QUALITIES[quality])


def _adapted(title: str, **fields: Any) -> Method:
    """Of studies alone."""
    return replace(_adapters(title, _adapt, **fields), is_tuned=False)


METHODS: dict[str, Method] = {
    EXACT: Method("exact", "exact", nn.Module.train, is_exact=True),
    NUDGED: Method("exact, nudged", "exact", _nudge, {"by": 1e-6}, is_exact=True, is_tuned=False),
    "checkpoint": Method("checkpointing, all blocks", "exact", checkpoint, is_exact=True),
    "checkpoint-offload": Method("checkpointing, offloaded", "exact", use_offloaded, is_exact=True),
    "compiled": Method("exact, compiled", "exact", use_compiled, is_exact=True, is_compiled=True),
    **{
        f"gaussian-{share}": Method(f"Gaussian sketch, {share} %", "published", use_paper, {"ratio": share / 100})
        for share in (50, 10)
    },
    **{f"dense-{share}": _dense(share) for share in (20, 10)},
    "wta-30": Method("WTA-CRS, 30 %", "published", _wta, {"ratio": 0.3, **_WTA}, is_indexed=True),
    "few-bits": Method("few-bit GELU, 3 bits", "published", use_few_bits, {"bits": 3}),
    "gact": Method("GACT's rule, 4 bits", "published", use_gact, {"bits": 4}),
    "prac-4": Method("PRAC, rank 4", "published", use_prac, {"rank": 2, "interval": 200}),
    "prac-60": Method("PRAC, 60 %", "published", use_prac, {"rank": 0.3, "interval": 500, "others": 0.2}),
    "fp8": Method("inductor, 8 bits", "published", use_compiled, {"quantized": True}, is_compiled=True),
    "lora": _adapters(f"LoRA, rank {_RANK}", _lora),
    "velora": _adapters(f"VeLoRA, rank {_RANK}", _lora, groups=64),
    "loract": _adapters("LoRAct, rank 1/8", _loract),
    "lora-tenth": _adapters("LoRA, and ours on it", lambda model, rank: _converted(_lora(model, rank=rank))),
    "tenth": Method("ours, default", "ours", _converted, _DEFAULT),
    **{
        name: Method(title, "ours", _converted, {**_DEFAULT, "operations": one}, is_tuned=False)
        for name, (title, one) in PARTS.items()
    },
    "careful": Method("ours, careful", "ours", _converted, QUALITIES["careful"]),
    "smallest": Method("ours, smallest", "ours", _converted, QUALITIES["smallest"]),
    "fit-25": Method("fit, least + 25 %", "ours", nn.Module.train, budget=0.25),
    **{f"lora-{name}": _adapted(f"LoRA, and ours on it, {name}", quality=name) for name in ("careful", "smallest")},
    "lora-sketched": replace(_adapters("LoRA, our variant", sketched_lora), is_tuned=False),
    "qlora": _adapted(f"QLoRA, rank {_RANK}", is_quantized=True),
    "qlora-tenth": _adapted("QLoRA, and ours on it", is_quantized=True, quality="default"),
}
TUNED = tuple(name for name, method in METHODS.items() if method.is_tuned)

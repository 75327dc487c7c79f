"""The methods that are compared: what each does to a model before it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.frontier.few_bits import use_few_bits
from benchmarks.frontier.gact import use_gact
from rmm_linear import RMMConfig, convert
from rmm_linear.planning import load_plan

EXACT = "exact"
LEARNING_RATE, LORA_LEARNING_RATE = 1e-4, 1e-3
_RANK = 16


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        title: As tables show it.
        group: "exact", "published", "fewer parameters" or "ours".
        prepare: Changes a model in place, or wraps it; returns what trains.
        learning_rate: Of AdamW.
        is_exact: Whether gradients are the exact model's to the bit, so that nothing has to be trained again.
        is_indexed: Whether the model takes the numbers of the examples.
        budget: Of a plan: the share of what the exact step's peak has above the least of any plan.
    """

    title: str
    group: str
    prepare: Callable[[nn.Module], nn.Module]
    learning_rate: float = LEARNING_RATE
    is_exact: bool = False
    is_indexed: bool = False
    budget: float | None = None

    def planned(self, plan: Path | None) -> Callable[[nn.Module], nn.Module]:
        """Return what prepares a model for this method.

        Args:
            plan: The saved plan, where there is a budget.

        Returns:
            A function that changes a model in place, or wraps it, and returns what trains.

        Raises:
            ValueError: If the plan is missing.
        """
        if self.budget is None:
            return self.prepare
        if plan is None or not plan.is_file():
            raise ValueError(f"{self.title} needs a plan, and there is no {plan}. Run part cost first, which makes it.")
        return lambda model: _planned(model, plan)


def _planned(model: nn.Module, path: Path) -> nn.Module:
    load_plan(path).apply(model)
    return model


def _unchanged(model: nn.Module) -> nn.Module:
    return model


def _converted(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        convert(model, RMMConfig(**fields))
        return model

    return prepare


def _checkpointed(step: int) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        from transformers.modeling_layers import GradientCheckpointingLayer

        newer = getattr(model, "activation_checkpointing_enable", None)
        enable: Any = newer or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        blocks = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
        for place, block in enumerate(blocks):
            block.gradient_checkpointing = place % step == 0
        return model

    return prepare


def _few_bits(model: nn.Module) -> nn.Module:
    use_few_bits(model, 3)
    return model


def _gact(model: nn.Module) -> nn.Module:
    use_gact(model, 4)
    return model


def _lora(**fields: Any) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        settings: dict[str, Any] = {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": "all-linear"}
        if fields:
            from peft import VeloraConfig

            settings["velora_config"] = VeloraConfig(**fields)
        kind = "SEQ_CLS" if hasattr(model, "classifier") else None
        return get_peft_model(model, LoraConfig(task_type=kind, **settings))  # pyright: ignore[reportArgumentType]

    return prepare


# All linear layers but those of the head, which see one row per sequence.
_PUBLISHED = {"operations": ("linear",), "mask_padding": False, "bits": None, "min_rows": 1}
_PUBLISHED |= {"exclude_modules": r"(.*\.)?classifier(\..*)?"}
_WIDE = {"ratio": 1.0, "bits": 8, "activation_bits": 8, "norm_bits": 4, "attention_bits": 8}
_NARROW = {"memory": 0.05, "bits": 2, "activation_bits": 2, "norm_bits": 2, "attention_bits": 4}

METHODS: dict[str, Method] = {
    EXACT: Method("exact", "exact", _unchanged, is_exact=True),
    "checkpoint": Method("checkpointing, all blocks", "exact", _checkpointed(1), is_exact=True),
    "checkpoint-half": Method("checkpointing, half", "exact", _checkpointed(2), is_exact=True),
    **{
        f"gaussian-{share}": Method(
            f"Gaussian sketch, {share} %", "published", _converted(kind="gaussian", ratio=share / 100, **_PUBLISHED)
        )
        for share in (50, 20, 10)
    },
    **{
        f"wta-{share}": Method(
            f"WTA-CRS, {share} %",
            "published",
            _converted(kind="wta", ratio=share / 100, norm_estimator="sample_cache", uniform_mix=1e-6, **_PUBLISHED),
            is_indexed=True,
        )
        for share in (30, 10)
    },
    "few-bits": Method("few-bit GELU, 3 bits", "published", _few_bits),
    "gact": Method("GACT's rule, 4 bits", "published", _gact),
    "lora": Method(f"LoRA, rank {_RANK}", "fewer parameters", _lora(), LORA_LEARNING_RATE),
    "velora": Method(f"VeLoRA, rank {_RANK}", "fewer parameters", _lora(num_groups=64), LORA_LEARNING_RATE),
    "linears": Method("ours, linears only", "ours", _converted(operations=("linear",))),
    "wide": Method("ours, wide", "ours", _converted(**_WIDE)),
    "tenth": Method("ours, default", "ours", _converted()),
    "narrow": Method("ours, narrow", "ours", _converted(**_NARROW)),
    **{
        f"fit-{round(100 * share)}": Method(f"fit, least + {round(100 * share)} %", "ours", _unchanged, budget=share)
        for share in (0.5, 0.25, 0.1)
    },
}

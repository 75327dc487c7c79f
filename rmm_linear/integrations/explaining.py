"""Explain the conversion of a model that is being trained, for a callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rmm_linear.conversion.exact import converted_modules, set_aside
from rmm_linear.conversion.explained import explained
from rmm_linear.conversion.explanation import Explanation
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.memory.inputs import saved_tensors


def late_linears(model: torch.nn.Module) -> list[str]:
    """Name the linear layers that came after a conversion, as adapters do."""
    contexts = {one.rmm_context for one in converted_modules(model) if one.rmm_context is not None}
    return [name for context in contexts for name in context.checks.late_linears()]


def is_converted(model: torch.nn.Module) -> bool:
    return bool(converted_modules(model))


def saved_by_model(model: torch.nn.Module, report: ConversionReport, loss: Callable[[], Any]) -> Explanation | str:
    """Find what the whole model saves, exactly and converted: no failure may end the training."""
    try:
        return explained(model, report, loss)
    except torch.OutOfMemoryError:
        pass  # the exact pass is freed with its error
    except Exception as error:
        return f"what the model saves cannot be measured on this batch: {type(error).__name__}: {error}"
    try:
        with set_aside(model):
            count = saved_tensors(model, loss)[0].total / 2**20
    except torch.OutOfMemoryError:
        return "what the model saves cannot be measured on this batch: it runs out of memory, converted too"
    return f"saved for backward: {count:.1f} MiB; the exact model runs out of memory on this batch"

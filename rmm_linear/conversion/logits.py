"""Choose the output layers whose logits the loss does not need as a whole."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

from torch import nn

from rmm_linear.config import RMMConfig
from rmm_linear.conversion.linears import replaced_reason
from rmm_linear.conversion.names import matches, output_heads


def choose_heads(
    model: nn.Module, config: RMMConfig, names: dict[nn.Module, str], sketched: Container[str]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Choose the output layers of language models that are to compute the loss in chunks.

    Args:
        model: A model of transformers, or any with a submodule that has ``get_output_embeddings``.
        config: Its ``exclude_modules`` is used.
        names: Every submodule to its name.
        sketched: Names of the layers whose input is sketched.

    Returns:
        Name to layer; and name to reason for the others over a vocabulary.
    """
    chosen: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    is_fused = any(_is_fused(module) for module in model.modules() if hasattr(module, "get_output_embeddings"))
    for head in output_heads(model):
        name = names.get(head)
        if name is None:
            continue
        reason = replaced_reason(head)
        if config.exclude_modules is not None and matches(config.exclude_modules, name):
            reason = "in exclude_modules"
        elif name in sketched:
            reason = "its input is sketched, so its logits stay as they are"
        elif is_fused:
            reason = "Liger's fused loss is on, which computes no logits"
        elif type(head) is not nn.Linear:
            reason = f"its logits stay as they are: it is a {type(head).__name__}, not nn.Linear itself"
        if reason is None:
            chosen[name] = head
        else:
            skipped[name] = reason
    return chosen, skipped


def _is_fused(module: Any) -> bool:
    """Whether a module's forward, its own or its class's, comes from Liger."""
    forward = inspect.unwrap(module.forward)
    source = getattr(getattr(forward, "__func__", forward), "__module__", None) or ""
    return source.split(".")[0] == "liger_kernel"

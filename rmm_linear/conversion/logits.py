"""Let a language model compute its loss without its logits as a whole."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from rmm_linear._support.validation import check_integer
from rmm_linear.activations.logits import ChunkedHead
from rmm_linear.losses import CHUNK


def chunk_logits(model: nn.Module, *, chunk: int = CHUNK) -> str | None:
    """Make a language model's output layer return logits that its loss does not need as a whole.

    In training, the model's own ``forward`` then computes the same loss through
    :func:`rmm_linear.losses.chunked_cross_entropy`, whatever its definition is: which labels are shifted or ignored,
    and what the sum is divided by, is the model's own code. Its output has the logits still: they are computed when
    they are read, which must happen before the optimizer's step. Nothing changes in eval mode, without gradients, in
    compiled code, and for as few rows as one chunk has.

    Models whose loss is no plain cross entropy of their logits, or that change the logits in another way than by
    views, casts to float, a factor or a cap, compute them as before.

    Args:
        model: A model of transformers, or any with ``get_output_embeddings``; changed in place. Undone by
            :func:`unchunk_logits`.
        chunk: Rows of logits at a time.

    Returns:
        None if the model was changed, or was before; else why it was not.
    """
    check_integer("chunk", chunk)
    embeddings = getattr(model, "get_output_embeddings", None)
    head: Any = embeddings() if callable(embeddings) else None
    if head is None:
        return f"{type(model).__name__} has no output layer over a vocabulary (get_output_embeddings returns none)."
    if _is_fused(model):
        return "Liger's fused loss is on, which computes no logits."
    if isinstance(head, ChunkedHead):
        head.rmm_chunk = chunk
        return None
    if type(head) is not nn.Linear:
        return f"The output layer is a {type(head).__name__}; only nn.Linear itself can be changed."
    if "forward" in vars(head):
        return "The output layer has a forward of its own (as offloading or a quantizer installs it)."
    changed: Any = head
    changed.__class__ = ChunkedHead
    changed.rmm_chunk = chunk
    return None


def unchunk_logits(model: nn.Module) -> None:
    """Undo :func:`chunk_logits`.

    Args:
        model: The model; left as it is if it was not changed.
    """
    heads: list[Any] = [module for module in model.modules() if type(module) is ChunkedHead]
    for head in heads:
        del head.rmm_chunk
        head.__class__ = nn.Linear


def _is_fused(model: nn.Module) -> bool:
    """Whether the model's forward, its own or its class's, comes from Liger."""
    forward = inspect.unwrap(model.forward)
    module = getattr(getattr(forward, "__func__", forward), "__module__", None) or ""
    return module.split(".")[0] == "liger_kernel"

"""Packed attention through transformers' ``AttentionInterface``.

The function of a model's attention is looked up there by the name in its configuration. While there are converted
modules, the function of "sdpa" is ours, which packs for them and calls that of transformers for all others, and
wherever it cannot pack. When the last one is reverted, that of transformers is back. Configurations stay as they are.

Modules with other functions, whose outputs differ from those of "sdpa" in the last bits, run again in the backward pass
(:mod:`rmm_linear.activations.region`); so do those that call it with arguments that cannot be packed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rmm_linear.activations.attention import names_in_forward
from rmm_linear.activations.attention_function import Attention, why_elsewhere
from rmm_linear.activations.own_forward import original_forward
from rmm_linear.activations.region import PackedRegion
from rmm_linear.config import RMMConfig
from rmm_linear.context.surroundings import has_saving_hooks, in_backward

_SDPA = "sdpa"
_UNSUPPORTED = ("softcap", "s_aux", "cache")


class PackedAttention(PackedRegion):
    """A module of transformers whose attention is packed by :func:`packed_sdpa`; its ``forward`` is its own."""

    config: Any
    rmm_is_region: bool  # whether it trains as a region, since a call that the function cannot pack

    def _set_up(self, config: RMMConfig | None, *arguments: Any, **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        self.rmm_is_region = False
        _swap(self)

    def _tear_down(self) -> None:
        super()._tear_down()
        _PACKED.discard(self)
        if not _PACKED:
            _swap_back()

    def __setstate__(self, state: Any) -> None:
        """Swap the function in the process that a copy is made in."""
        super().__setstate__(state)
        _swap(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in which the function packs; or as a region."""
        if self.rmm_is_region:
            return super().forward(*args, **kwargs)
        return original_forward(self)(*args, **kwargs)

    def _note_exact(self, reason: str | None) -> None:
        """Train as a region from the next call on where the function cannot pack."""
        is_watched = torch.compiler.is_compiling() or in_backward() or has_saving_hooks()  # as of a checkpoint
        is_watched = is_watched or why_elsewhere() is not None
        if reason is not None and self.rmm_linears and not self.rmm_is_region and not is_watched:
            vars(self)["rmm_is_region"] = True
            return
        super()._note_exact(reason)

    def _why_not_called(self) -> str:
        name = self.config._attn_implementation
        if name == _SDPA:
            return "its forward did not call the function of its attn_implementation"
        remedy = "Call rmm_linear.revert, model.set_attn_implementation('sdpa') and rmm_linear.convert"
        return f"its attn_implementation was set to {name!r} after it was converted. {remedy}"


_PACKED: WeakSet[PackedAttention] = WeakSet()  # all there are, for which the function is swapped


def is_attention(module: nn.Module) -> bool:
    """Say whether a module looks its attention function up in transformers' ``AttentionInterface``."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module) and hasattr(module, "config")


def stays_exact(module: Any) -> str | None:
    """Return why an attention of transformers cannot be packed, before it is converted."""
    name = getattr(module.config, "_attn_implementation", None)
    if name != _SDPA:
        remedy = "Use model.set_attn_implementation('sdpa')."
        return f"its attn_implementation is {name!r}, whose output is not that of 'sdpa' to the bit. {remedy}"
    return _why_foreign(_registered())


def _swap(module: PackedAttention) -> None:
    """Swap the function of "sdpa" for a module; transformers must be imported."""
    from transformers import AttentionInterface

    _PACKED.add(module)
    current = _registered()
    if not _is_ours(current) and _why_foreign(current) is None:
        AttentionInterface.register(_SDPA, functools.partial(packed_sdpa, sdpa=current))


def _swap_back() -> None:
    from transformers import AttentionInterface

    current = AttentionInterface._global_mapping[_SDPA]
    if _is_ours(current):  # else the user has registered another one since then
        AttentionInterface.register(_SDPA, current.keywords["sdpa"])


def _registered() -> Any:
    """Return the function that a lookup of "sdpa" finds."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[_SDPA]


def _why_foreign(function: Any) -> str | None:
    """Say that a function is neither transformers' nor ours: what it computes is not known."""
    if _is_ours(function) or getattr(function, "__module__", None) == "transformers.integrations.sdpa_attention":
        return None
    name = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__name__)}"
    return f"another library has registered {name} as 'sdpa'. Convert before it does"


def _is_ours(function: Any) -> bool:
    return isinstance(function, functools.partial) and function.func is packed_sdpa


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    sdpa: Callable[..., tuple[Tensor, Tensor | None]],
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply attention as ``sdpa`` does, and save it packed; return the output, (B, Tq, h, dv), and None.

    module: The caller; for one that is not converted, ``sdpa`` is called. Shapes as of
    :func:`~rmm_linear.activations.attention_function.packed_attention`. is_causal: None asks the module.
    sdpa: The function of transformers. ``position_bias``, which is added to the scores, may need a gradient.
    """
    if not isinstance(module, PackedAttention) or module.rmm_is_region:
        named = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return sdpa(module, query, key, value, attention_mask, **named)
    bias = kwargs.get("position_bias")
    # On CPU, a bias that needs a gradient keeps PyTorch from its fused kernel, whose last bits are others. Inside of
    # our autograd function nothing needs one.
    is_plain = bias is not None and bias.requires_grad and torch.is_grad_enabled() and query.device.type == "cpu"

    def exact(query: Tensor, key: Tensor, value: Tensor, p: float = 0.0) -> Tensor:
        named = {"dropout": p, "scaling": scaling, "is_causal": is_causal, **kwargs}
        with sdpa_kernel(SDPBackend.MATH) if is_plain else nullcontext():
            return sdpa(module, query, key, value, attention_mask, **named)[0]

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(query.shape[2] > 1 and attention_mask is None and causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = Attention(scale, causal, dropout, module._bits)
    reason = _reason(kwargs, (*query.shape[:3], key.shape[2]))
    output = module._attend(query, key, value, attention_mask, attention, exact, reason, bias)
    return (exact(query, key, value, dropout) if output is None else output), None


def _reason(kwargs: dict[str, Any], scores: tuple[int, ...]) -> str | None:
    """Say why arguments are not supported."""
    bias = kwargs.get("position_bias")
    if bias is not None and not _broadcasts(bias.shape, scores):
        # Without the shapes: a reason is said once, and lengths differ from batch to batch.
        return "its position_bias does not have the shape of its scores, or that with 1 for batch or heads"
    given = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    given += ["output_attentions"] if kwargs.get("output_attentions") else []
    return f"it is called with {', '.join(given)}" if given else None


def _broadcasts(shape: torch.Size, scores: tuple[int, ...]) -> bool:
    """Whether a shape is that of scores, or with 1 for batch or heads; not hashed, which would fix traced lengths."""
    return len(shape) == 4 and shape[2:] == scores[2:] and shape[0] in (1, scores[0]) and shape[1] in (1, scores[1])

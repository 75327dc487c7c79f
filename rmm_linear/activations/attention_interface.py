"""Packed attention through transformers' ``AttentionInterface``.

The function of a model's attention is looked up by the name in its configuration. Converting registers one of ours,
with the mask function of "sdpa", and writes its name where "sdpa" was. The configuration may be that of several models;
when the last module that packs with it is reverted, it has "sdpa" again. The function is that of "sdpa" itself for
modules that are not converted, and wherever it cannot pack.

Configurations of other functions stay as they are: "eager" and "flash_attention_2" give outputs that differ from those
of "sdpa" in the last bits, so converting would change the model. So do those of models whose code asks whether the
name is "sdpa", as some do where they prepare masks.

The name is in no file: transformers leaves it out of ``config.json``, so ``save_pretrained`` needs nothing.
"""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rmm_linear.activations.attention import names_in_forward
from rmm_linear.activations.attention_function import Attention
from rmm_linear.activations.region import PackedRegion
from rmm_linear.activations.region_run import original_forward
from rmm_linear.config import RMMConfig

NAME = "rmm_sdpa"
_SDPA = "sdpa"
_ASKS = re.compile(r"""_attn_implementation\s*(?:[!=]=|(?:not\s+)?in\b)[^\n]*["']sdpa["']""")
_UNSUPPORTED = ("softcap", "s_aux", "cache")


class PackedAttention(PackedRegion):
    """A module of transformers whose attention is packed by :func:`packed_sdpa`; its ``forward`` is its own.

    Attributes:
        rmm_is_region: Whether it trains as a region, since a call that the function cannot pack.
    """

    config: Any
    rmm_is_region: bool

    def _set_up(self, config: RMMConfig | None, *arguments: Any, **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        self.rmm_is_region = False
        register()
        _PACKED.add(self)
        # A model makes its masks by the name in a configuration, which is the object that its attention modules have.
        if self.config._attn_implementation == _SDPA:
            _set_name(self.config, NAME)

    def _tear_down(self) -> None:
        super()._tear_down()
        _PACKED.discard(self)
        is_used = any(other.config is self.config for other in _PACKED)
        if not is_used and self.config._attn_implementation == NAME:  # else the user has changed it since then
            _set_name(self.config, _SDPA)

    def __setstate__(self, state: Any) -> None:
        """Register the function, whose name is in the configuration that comes with the module."""
        super().__setstate__(state)
        register()
        _PACKED.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in which the function packs; or as a region."""
        if self.rmm_is_region:
            return super().forward(*args, **kwargs)
        return original_forward(self)(*args, **kwargs)

    def _note_exact(self, reason: str | None) -> None:
        """Train as a region from the next call on where the function cannot pack."""
        if reason is not None and self.rmm_linears and not self.rmm_is_region and not torch.compiler.is_compiling():
            vars(self)["rmm_is_region"] = True
            return
        super()._note_exact(reason)

    def _why_not_called(self) -> str:
        name = self.config._attn_implementation
        if name == NAME:
            return "its forward did not call the function of its attn_implementation"
        remedy = "Call rmm_linear.revert, model.set_attn_implementation('sdpa') and rmm_linear.convert"
        return f"its attn_implementation was set to {name!r} after it was converted. {remedy}"


_PACKED: WeakSet[PackedAttention] = WeakSet()  # all there are: they need the name in their configurations


def is_attention(module: nn.Module) -> bool:
    """Say whether a module looks its attention function up in transformers' ``AttentionInterface``."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in_forward(module) and hasattr(module, "config")


def stays_exact(module: Any) -> str | None:
    """Return why an attention of transformers cannot be packed, before it is converted."""
    name = getattr(module.config, "_attn_implementation", None)
    if name not in (_SDPA, NAME):
        remedy = "Use model.set_attn_implementation('sdpa')."
        return f"its attn_implementation is {name!r}, whose output is not that of 'sdpa' to the bit. {remedy}"
    if _asks_for_sdpa(type(module)):
        return "its model's code treats attn_implementation='sdpa' specially"
    return None


def _set_name(config: Any, name: str) -> None:
    """Write a name in a configuration, and leave the configurations inside of it as they are."""
    config._attn_implementation = {"": name}


def register() -> None:
    """Register the function and its masks with transformers, which must be imported."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, packed_sdpa)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[_SDPA])


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Apply attention as the function of "sdpa" does, and save it packed; return the output, (B, Tq, h, dv), and None.

    module: The caller; one that is not converted gets the function of "sdpa". Shapes as of
    :func:`~rmm_linear.activations.attention_function.packed_attention`. is_causal: None asks the module.
    ``position_bias``, which is added to the scores, may need a gradient.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa, bias = ALL_ATTENTION_FUNCTIONS[_SDPA], kwargs.get("position_bias")
    # On CPU, a bias that needs a gradient keeps PyTorch from its fused kernel, whose last bits are others. Inside of
    # our autograd function nothing needs one.
    is_plain = bias is not None and bias.requires_grad and torch.is_grad_enabled() and query.device.type == "cpu"

    def exact(query: Tensor, key: Tensor, value: Tensor, p: float = 0.0) -> Tensor:
        named = {"dropout": p, "scaling": scaling, "is_causal": is_causal, **kwargs}
        with sdpa_kernel(SDPBackend.MATH) if is_plain else nullcontext():
            return sdpa(module, query, key, value, attention_mask, **named)[0]

    output = None
    if isinstance(module, PackedAttention) and not module.rmm_is_region:
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


def _asks_for_sdpa(kind: type[nn.Module]) -> bool:
    """Say whether the code of a module's file compares the name of the function with "sdpa"."""
    for base in kind.__mro__:
        file = sys.modules.get(base.__module__)
        if file is not None and base.__module__.startswith(("torch.", "rmm_linear.", "builtins")):
            continue
        try:
            if file is not None and _ASKS.search(inspect.getsource(file)):
                return True
        except (OSError, TypeError):
            continue
    return False

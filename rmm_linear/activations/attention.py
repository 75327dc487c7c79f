"""Attention that saves packed queries, keys and values: the function, and the modules that call it.

Two kinds of modules can be converted without changing PyTorch or transformers:

* Those of transformers that look their function up in its ``AttentionInterface``: ``attention_interface.py`` registers
  a function of ours there, which packs for modules of the class ``PackedAttention`` and is that of "sdpa" for all
  others.
* Those whose ``forward`` calls ``F.scaled_dot_product_attention`` itself, ``nn.MultiheadAttention`` among them (and so
  ``nn.TransformerEncoderLayer``): :class:`PackedAttentionCaller` runs the module's own ``forward`` under a
  ``TorchFunctionMode`` that packs this one call. Everything else of the module stays what it is, such as
  ``need_weights=True``, for which ``nn.MultiheadAttention`` makes the probabilities itself and saves them: it says so
  in the first call in training, once for a model, as does every attention that stays exact.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from rmm_linear._support.autocast import autocast_off
from rmm_linear.activations.attention_function import BITS, Attention, Exact, packed_attention, why_elsewhere, why_exact
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.config import RMMConfig
from rmm_linear.context.learned import ScoreSpread
from rmm_linear.context.surroundings import in_backward
from rmm_linear.packing.attention import check_attention_bits
from rmm_linear.sketches.seeds import draw_seed, is_capturing

logger = logging.getLogger(__name__)

_WIDE = 8  # bits of queries and keys whose scores spread far
_NOT_CALLED = "its forward did not call F.scaled_dot_product_attention"
_WEIGHTS = "it makes the probabilities itself with need_weights=True, its default. Pass need_weights=False"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    bits: int = BITS,
    attend: Callable[..., Tensor | None] | None = None,
) -> Tensor:
    """``F.scaled_dot_product_attention`` that saves packed queries, keys and values instead of these and its output.

    The output is that of PyTorch to the bit, on CUDA with dropout too; on CPU with dropout, up to rounding, with the
    same random numbers: the seed of the rounding is drawn after them. The gradients have the noise of packing, and a
    bias that is small compared with it, see :mod:`rmm_linear.packing.attention`; take 8 bits where scores are large. If
    a call cannot be packed, as with a mask that needs a gradient, all is exact; so it is where there are no sequences
    or no tokens.

    query: (B, h, Tq, d). key: (B, hk, Tk, d). value: (B, hk, Tk, dv). attn_mask: Bool (true where a query sees a key)
    or additive, broadcasts with (B, h, Tq, Tk). bits: 8 or 4. attend: Packs a call, or returns None; without it, the
    call is packed with a new seed, padding included.
    """
    check_attention_bits(bits)
    named = {"scale": scale, "enable_gqa": enable_gqa}

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **named).transpose(1, 2)

    attention = Attention(query.shape[-1] ** -0.5 if scale is None else scale, is_causal, dropout_p, bits)
    output = (attend or _attend_alone)(query, key, value, attn_mask, attention, exact)
    if output is not None:
        return output.transpose(1, 2)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **named)
    if attend is None and not torch.compiler.is_compiling():
        draw_seed()  # as a packed call does: the first pass of a checkpoint may be this one, and the second packed
    return output


def _attend_alone(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention, exact: Exact
) -> Tensor | None:
    if not _is_saving(query, key, value) or why_exact(query, key, value, mask, attention.is_causal, attention.p):
        return None
    return packed_attention(query, key, value, mask, attention, SavingCall(), exact)


def _is_saving(*tensors: Tensor) -> bool:
    """Say whether something is to be packed: of an empty tensor there is nothing."""
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return needs_gradient and all(tensor.numel() for tensor in tensors)


class AttendingModule(PackedModule):
    """Base class of modules whose attention is packed."""

    rmm_operation = "attention"
    rmm_learns_rows = False  # keys and values are read by all rows
    rmm_exact: str | None  # why the last call in training was exact; None if it was packed
    rmm_hides: dict[tuple[bool, bool], tuple[bool, int | None]]  # see SavingCall.answers
    rmm_hook: RemovableHandle

    def _set_up(self, config: RMMConfig | None, *arguments: Any, **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        if self.rmm_context is not None and self.rmm_config.attention_bits < _WIDE:
            self.rmm_context.learned[self.rmm_index] = ScoreSpread()
        self.rmm_exact, self.rmm_hides = None, {}
        # A hook, as a forward of ours would hide the names of the module's arguments.
        self.rmm_hook = self.register_forward_hook(_note_call)

    def _tear_down(self) -> None:
        self.rmm_hook.remove()
        super()._tear_down()

    @property
    def _bits(self) -> int:
        return self.rmm_config.attention_bits

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        attention: Attention,
        exact: Exact,
        reason: str | None = None,
        bias: Tensor | None = None,
    ) -> Tensor | None:
        """Return the output, shape (B, Tq, h, dv); None where the exact function is to be called."""
        if not self.training:
            return None
        if not torch.compiler.is_compiling():
            note_attended(self)
        call = self._packed_call((query.shape[0], query.shape[-2]), query.device)
        if call.is_exact or not _is_saving(query, key, value, *([] if bias is None else [bias])):
            return None
        reason = reason or why_exact(query, key, value, mask, attention.is_causal, attention.p)
        self._note_exact(reason)
        if reason is not None:
            return None
        call.answers = vars(self).setdefault("rmm_hides", {})  # which pickled models may not have
        self._look_at_scores(query, key, attention)
        return packed_attention(query, key, value, mask, attention, call, exact, bias)

    def _look_at_scores(self, query: Tensor, key: Tensor, attention: Attention) -> None:
        """Observe how far the scores spread, and take 8 bits for queries and keys where that is far."""
        spread = None if self.rmm_context is None else self.rmm_context.learned.get(self.rmm_index)
        if not isinstance(spread, ScoreSpread):
            return
        if spread.is_large:
            attention.bits = (_WIDE, _WIDE, self.rmm_config.attention_bits)
            return
        is_hidden = torch.compiler.is_compiling() or in_backward() or isinstance(query, FakeTensor)
        if not is_hidden and not is_capturing(query.device) and spread.is_due():
            with torch.no_grad(), _disable_current_modes(), autocast_off(query.device.type):
                spread.observe(query.detach(), key.detach(), attention.scale)

    def _note_exact(self, reason: str | None) -> None:
        """Keep why a call was exact, and say it once for a model."""
        if reason is not None and not torch.compiler.is_compiling():
            context = self.rmm_context
            name, said = type(self).__name__, {self.rmm_exact}
            if context is not None:
                name, said = context.names[self.rmm_index], context.checks.said
            if reason not in said:
                said.add(reason)
                logger.warning(
                    "The attention of %s stays exact and saves what it saved before: %s. "
                    "Further modules with the same reason are not named.",
                    name,
                    reason,
                )
        vars(self)["rmm_exact"] = reason
        self._note_call(reason)

    def _why_not_called(self) -> str:
        """Say why a call of the module has not come to :meth:`_attend`."""
        return why_elsewhere() or _NOT_CALLED


class _Attended(threading.local):
    """The modules whose current call in this thread has come to our attention."""

    def __init__(self) -> None:
        """Start with none."""
        self.modules: set[int] = set()


_attended = _Attended()


def note_attended(module: nn.Module) -> None:
    """Note that the current call of a module is ours."""
    _attended.modules.add(id(module))


def _note_call(module: nn.Module, args: Any, output: Any) -> None:
    """Say that a call in training had an attention of its own; not where the module is exact for a while."""
    if torch.compiler.is_compiling() or not module.training or not isinstance(module, AttendingModule):
        return
    if id(module) not in _attended.modules:
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            module._note_exact(module._why_not_called())
        return
    _attended.modules.discard(id(module))


class PackedAttentionCaller(AttendingModule):
    """A module that calls ``F.scaled_dot_product_attention``, which is packed."""

    def _set_up(self, config: RMMConfig | None, *arguments: Any, **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        self.rmm_hook.remove()  # PyTorch's encoder layers have a fast path in eval mode, if nothing in them has hooks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; exact in compiled code, as compilers do not trace all of a mode."""
        if not self.training or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with _PackingMode(self):
            output = super().forward(*args, **kwargs)
        _note_call(self, args, output)
        return output

    def _why_not_called(self) -> str:
        return _WEIGHTS if isinstance(self, nn.MultiheadAttention) else super()._why_not_called()


class _PackingMode(TorchFunctionMode):
    """Hands calls of F.scaled_dot_product_attention to a module."""

    def __init__(self, module: AttendingModule) -> None:
        super().__init__()
        attend, bits = module._attend, module._bits
        self.packed = functools.partial(scaled_dot_product_attention, bits=bits, attend=attend)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self.packed
        elif func is F.multi_head_attention_forward:  # the mode does not hold inside of it
            func = _rebound(func, scaled_dot_product_attention=self.packed)
        return func(*args, **(kwargs or {}))


def _rebound(function: FunctionType, **names: Any) -> FunctionType:
    """Return the same code, with other objects for some of its global names."""
    made = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    # Under another mode, as of a default device, PyTorch's functions hand themselves to it by their name.
    made.__globals__[function.__name__] = made
    return made


def calls_attention(module: nn.Module) -> bool:
    """Say whether a module's own forward calls ``F.scaled_dot_product_attention``."""
    return type(module) is nn.MultiheadAttention or "scaled_dot_product_attention" in names_in_forward(module)


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """Return the global names and attributes that a module's own forward reads."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names

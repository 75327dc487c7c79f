"""SketchedLayer: the base class of all layers that save a sketch of their input."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear._support.autocast import autocast_dtype
from rmm_linear._support.distributed import is_dtensor
from rmm_linear.config import RMMConfig
from rmm_linear.context.auto_bits import AutoBits
from rmm_linear.context.autograd_nodes import in_backward
from rmm_linear.context.model_context import ModelContext
from rmm_linear.layers.functional import LinearCall, saved_linear, spec_for, unsaved_linear
from rmm_linear.norm_estimators import LayerCall, NormEstimator, make_norm_estimator
from rmm_linear.ops.save import is_capturing
from rmm_linear.sketches import TokenMask, row_norms
from rmm_linear.sketches.seeds import draw_seed
from rmm_linear.spec import SaveSpec

_PADDING = (
    "Padding must not reach the loss, but masked tokens of {} carry a gradient (the model pools over padding, or the "
    "labels cover it). Leaving them out would bias the weight gradient. Convert with mask_padding=False, or mask the "
    "padding in the loss."
)


class SketchedLayer(nn.Module):
    """Base class of the sketched layers: a configuration, and the layer's place in a converted model.

    Attributes:
        rmm_config: How the input is saved.
        rmm_context: The context of the converted model, or None for a layer outside of one.
        rmm_index: Index of the layer in the converted model.
        rmm_auto_bits: The width chosen for ``bits="auto"``.
        rmm_estimator: Predicts the norm of every token's gradient; None without a ``norm_estimator``.
        rmm_mask_checked: Whether a backward pass has shown that masked tokens carry no gradient.
    """

    rmm_config: RMMConfig
    rmm_context: ModelContext | None
    rmm_index: int
    rmm_auto_bits: AutoBits
    rmm_estimator: NormEstimator | None
    rmm_mask_checked: bool

    def _set_up(self, config: RMMConfig | None, context: ModelContext | None = None, index: int = 0) -> None:
        self.rmm_config = config or RMMConfig()
        self.rmm_context = context
        self.rmm_index = index
        self.rmm_auto_bits = AutoBits() if context is None else context.auto_bits_of(index)
        self.rmm_mask_checked = False
        self._set_estimator(make_norm_estimator(self.rmm_config.norm_estimator))

    def _set_estimator(self, estimator: NormEstimator | None) -> None:
        self.rmm_estimator = estimator
        if self.rmm_context is not None and estimator is not None:
            self.rmm_context.estimators[self.rmm_index] = estimator  # for layers that share a sketch with this one

    def _tear_down(self) -> None:
        for name in SketchedLayer.__annotations__:
            self.__dict__.pop(name, None)

    def _linear(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Apply the layer; ``shape`` has the leading dimensions of an input that is already flattened."""
        if is_dtensor(weight):
            raise RuntimeError(
                "A sketched layer needs its whole weight in its forward pass, got a DTensor: tensor parallel layers "
                "cannot be sketched. Name them in exclude_modules. (FSDP's fully_shard works; its layers run inside "
                "of the modules it was called on.)"
            )
        if not self.training:
            # Compilers trace all gradients in advance, and that of the unsaved layer's weight raises.
            run = F.linear if torch.compiler.is_compiling() else unsaved_linear
            return run(input, weight, bias)
        dtype = autocast_dtype(input.device.type, input.dtype)
        spec = spec_for(input.shape, (dtype or input.dtype).itemsize, weight, self.rmm_config, self._bits())
        if spec is None:
            return F.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            call = self._traced_call(input, spec, dtype)
        else:
            call = self._call(input, spec, dtype, tuple(input.shape[:-1]) if shape is None else shape)
        return saved_linear(input, weight, bias, call)

    def _bits(self) -> int | None:
        """The width chosen for ``bits="auto"``, for this call."""
        if torch.compiler.is_compiling():
            return self.rmm_auto_bits.bits
        if self.rmm_context is None and self.rmm_auto_bits.backward_seen and not in_backward():
            self.rmm_auto_bits.backward_seen = False
            self.rmm_auto_bits.choose()  # between steps: a checkpoint may hold several calls
        return self.rmm_auto_bits.width()

    def _call(self, input: Tensor, spec: SaveSpec, dtype: torch.dtype | None, shape: tuple[int, ...]) -> LinearCall:
        """Return what this call saves, with a seed in every grad mode: both passes of a checkpoint must take one."""
        config, context, index = self.rmm_config, self.rmm_context, self.rmm_index
        if context is None:
            call = LayerCall(shape, input.device)
        else:
            call = context.call_of(index, shape, input.device, config.mask_padding)
        is_choosing = config.bits == "auto" and config.memory is not None and self.rmm_auto_bits.bits is None
        if is_choosing and not in_backward() and not is_capturing(input.device):
            with _disable_current_modes():  # a selective checkpoint counts the operators, and must find them again
                x = input.detach().reshape(call.tokens, -1)
                self.rmm_auto_bits.observe(x, config, (dtype or input.dtype).itemsize, call.mask)
        # Set without an estimator too: layers that share the sketch may have one.
        expected = functools.partial(self._expected, call) if spec.samples_rows(call.tokens) else None
        on_backward = functools.partial(self._on_backward, call)
        if context is None:
            return LinearCall(spec, draw_seed(), dtype, call.mask, expected=expected, on_backward=on_backward)
        cache = context.sketch_cache if context.is_open() else None  # outside of a forward pass, nothing clears it
        return LinearCall(spec, context.layer_seed(index), dtype, call.mask, cache, index, expected, on_backward)

    def _traced_call(self, input: Tensor, spec: SaveSpec, dtype: torch.dtype | None) -> LinearCall:
        mask = None
        if self.rmm_context is not None and self.rmm_config.mask_padding:
            mask = self.rmm_context.traced_masks.token_mask(input.shape[:-1].numel())
        on_backward = None if mask is None else self._check_traced_padding
        return LinearCall(spec, None, dtype, mask, on_backward=on_backward)

    def _check_traced_padding(self, y: Tensor, mask: TokenMask | None) -> None:
        if mask is not None and not self.rmm_mask_checked:
            padding = y[mask.order]
            is_padding = torch.arange(len(y), device=y.device).unsqueeze(1) >= mask.count
            torch._assert_async(~((padding != 0) & padding.isfinite() & is_padding).any(), _PADDING.format("a layer"))  # pyright: ignore

    def _expected(self, call: LayerCall) -> Tensor | None:
        if self.rmm_context is not None:
            return self.rmm_context.expected(self.rmm_index, call)
        return None if self.rmm_estimator is None else self.rmm_estimator.predict(call)

    def _on_backward(self, call: LayerCall, y: Tensor, mask: TokenMask | None) -> None:
        if self.rmm_context is None:
            self.rmm_auto_bits.backward_seen = True
        else:
            self.rmm_context.note_backward()
        self._check_padding(y, mask)
        if self.rmm_estimator is not None:
            norms = row_norms(y.detach()).float()
            # A step that overflows has no usable norms. Adding zeros costs less than waiting for the device to test it.
            self.rmm_estimator.observe(call, torch.where(norms.isfinite().all(), norms, 0))

    def _check_padding(self, y: Tensor, mask: TokenMask | None) -> None:
        if mask is None or self.rmm_mask_checked or is_capturing(y.device):
            return
        padding = y[mask.order[int(mask.count) :]]
        finite = padding.isfinite()
        if bool((finite & (padding != 0)).any()):
            name = self.rmm_context.names[self.rmm_index] if self.rmm_context is not None else "the layer"
            raise RuntimeError(_PADDING.format(name))
        # Nothing is shown by a step that overflows, or without any gradient, as in the first step of LoRA (B = 0).
        self.rmm_mask_checked = bool(finite.all() & (y != 0).any())

    def _describe(self) -> str:
        config = self.rmm_config
        amount = (
            f"ratio={config.ratio:g}" if config.ratio is not None else f"memory={config.memory:g}, bits={config.bits}"
        )
        block = "" if config.block is None else f", block={config.block}"
        expected = f", norm_estimator={config.norm_estimator}" if self.rmm_estimator is not None else ""
        return f"kind={config.kind}, {amount}{block}{expected}, min_rows={config.min_rows}"

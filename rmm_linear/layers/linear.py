"""RMMLinear: nn.Linear that saves a sketch of its input for the backward pass, and the base class of such layers."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rmm_linear._support.autocast import autocast_dtype, is_autocast
from rmm_linear._support.distributed import dividing, is_dtensor
from rmm_linear._support.layouts import is_dense
from rmm_linear.config import RMMConfig
from rmm_linear.context.directions import Directions
from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.recomputation import ForwardPass
from rmm_linear.context.sketch_cache import CacheEntry
from rmm_linear.context.surroundings import is_unwatched
from rmm_linear.layers.converted import ConvertedModule, is_reverted
from rmm_linear.layers.function import (
    LinearCall,
    SavingCall,
    UnwatchedLinearFunction,
    saved_linear,
    spec_for,
    spec_of,
    unsaved_linear,
)
from rmm_linear.layers.sharded import linear_layout, say_exact, sharded_linear
from rmm_linear.norm_estimators import LayerCall, NormEstimator, make_norm_estimator
from rmm_linear.ops.save import is_view_of_more, save
from rmm_linear.sketches import SAMPLERS, TokenMask, row_norms
from rmm_linear.sketches.seeds import draw_seed, is_capturing
from rmm_linear.spec import SaveSpec

_PLAIN = {Tensor, nn.Parameter}


class LinearPlan(NamedTuple):
    """Decisions that follow from shape, element size, weight and configuration, made once for calls that are alike."""

    decided_by: tuple[Any, ...]
    spec: SaveSpec | None  # how the input is saved; None if the layer is exact
    # Whether the short way cannot save it: nothing, all rows as they are, or rows sampled by their norms
    is_general: bool
    key: str  # what is saved as a string, for the cache of sketches
    is_directed: bool  # whether fixed directions may be taken out of all rows that are saved
    # The decisions for fewer rows than all, by their number and whether they are of a learned pattern
    by_valid: dict[tuple[int, bool], LinearPlan]


class SketchedLayer(ConvertedModule):
    """Base class of the sketched layers: a configuration, and the layer's place in a converted model."""

    rmm_operation = "linear"
    rmm_estimator: NormEstimator | None  # predicts the norm of every token's gradient; None without a norm_estimator
    rmm_plan: LinearPlan | None  # of the last call

    def _set_up(self, config: RMMConfig | None, context: ModelContext | None = None, index: int = 0) -> None:
        super()._set_up(config, context, index)
        self.rmm_plan = None
        self._set_estimator(make_norm_estimator(self.rmm_config.norm_estimator))
        if context is not None and self.rmm_config.directions:
            context.directions[index] = Directions(self.rmm_config.directions)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Note where a layer that is converted already becomes a part of a tensor parallel one."""
        super().register_parameter(name, param)
        context = vars(self).get("rmm_context")
        if context is not None and is_dtensor(param):
            context.ranks.join(param.device_mesh, dividing(param))  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def _set_estimator(self, estimator: NormEstimator | None) -> None:
        self.rmm_estimator = estimator
        if self.rmm_context is not None and estimator is not None:
            self.rmm_context.estimators[self.rmm_index] = estimator  # for layers that share a sketch with this one

    def _linear(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Apply the layer; ``shape`` has the leading dimensions of an input that is already flattened."""
        if is_dtensor(weight):
            return self._sharded_linear(input, weight, bias)
        if not is_dense(input) or input.is_complex():
            return F.linear(input, weight, bias)
        output = self._unwatched_linear(input, weight, bias) if self.training else None
        if output is not None:
            return output
        self._refuse_transforms()
        if not self.training:
            # Compilers trace all gradients in advance, and that of the unsaved layer's weight raises.
            run = F.linear if torch.compiler.is_compiling() else unsaved_linear
            return run(input, weight, bias)
        dtype = autocast_dtype(input.device.type, input.dtype)
        itemsize = (dtype or input.dtype).itemsize
        spec = self._spec(input.shape, itemsize, weight)
        self._note_rows(input, spec)
        if spec is None and not is_view_of_more(input):
            return F.linear(input, weight, bias)
        if spec is None:  # all rows as they are, but not the tensor that they are a part of
            spec = SaveSpec("rows", input.shape[:-1].numel())
            return saved_linear(input, weight, bias, LinearCall(spec, 0, dtype))
        if self._stays_exact():
            return F.linear(input, weight, bias)
        if torch.compiler.is_compiling():
            call = self._traced_call(input, spec, dtype)
        else:
            call = self._call(input, weight, spec, dtype, tuple(input.shape[:-1]) if shape is None else shape)
        output = saved_linear(input, weight, bias, call)
        is_own = weight.requires_grad and dtype in (None, input.dtype)  # the exact layer keeps its input, and no cast
        return self._survey(input, output) if is_own and torch.is_grad_enabled() else output

    def _sharded_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer to the part of a tensor parallel one that this rank has; exactly in compiled code."""
        is_exact = torch.compiler.is_compiling() and say_exact()
        layout = None if is_exact else linear_layout(input, weight, bias)
        if layout is None:
            return F.linear(input, weight, bias)
        if self.rmm_context is not None:
            self.rmm_context.ranks.note(self.rmm_index, input.device_mesh, layout.output, layout.of_weight)  # pyright: ignore
        return sharded_linear(self._linear, layout, input, weight, bias)

    def _unwatched_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the output where nothing else looks, made with as little as possible; None for the general way."""
        own = vars(self)
        if not is_unwatched() or own["rmm_estimator"] is not None or is_autocast(input.device.type):
            return None
        if type(input) is not Tensor or type(weight) not in _PLAIN or input.is_neg() or input.dtype is not weight.dtype:
            return None
        shape = input.shape
        plan = self._plan(shape, input.itemsize, weight)
        call = None if plan.is_general else self._unwatched_call(shape[:-1], input.device)
        if call is None or call.seed is None or plan.spec is None:
            return None
        if call.mask is not None:
            plan = self._plan(shape, input.itemsize, weight, call.mask.valid_count, call.is_pattern)
        context, entry = own["rmm_context"], None
        if context is not None and context.sketch_cache.is_shared(own["rmm_index"]):
            entry = context.sketch_cache.entry(input, weight, (plan.key, call.mask, None), own["rmm_index"])
        saved = functools.partial(self._saved_rows, plan, call, entry)
        return UnwatchedLinearFunction.plain_apply(input, weight, bias, plan.spec, call, saved)

    def _saved_rows(
        self, plan: LinearPlan, call: SavingCall, entry: CacheEntry | None, x: Tensor
    ) -> tuple[Tensor, ...]:
        """Return what is saved of an unwatched input, shape (N, I), or was for another layer; without gradients."""
        if entry is not None and entry.saved is not None:
            return entry.saved
        own, basis = vars(self), None
        if plan.is_directed and own["rmm_context"] is not None:
            basis = own["rmm_context"].directions[own["rmm_index"]].basis_for(x, call.index)
        if basis is None:
            saved = save.run(x, plan.spec, call.mask, call.seed)
        else:
            saved = *save.run(x, plan.spec, call.mask, call.seed, None, basis), basis
        if entry is not None:
            entry.saved = saved
        return saved

    def _spec(self, shape: torch.Size, itemsize: int, weight: Tensor) -> SaveSpec | None:
        """Return the decision of :func:`spec_for`."""
        if torch.compiler.is_compiling():
            return spec_for(shape, itemsize, weight, self.rmm_config)
        return self._plan(shape, itemsize, weight).spec

    def _plan(
        self, shape: torch.Size, itemsize: int, weight: Tensor, valid: int | None = None, is_pattern: bool = False
    ) -> LinearPlan:
        own, config = vars(self), self.rmm_config
        decided_by, known = (shape, itemsize, weight.shape, weight.requires_grad, config), own["rmm_plan"]
        if known is None or known.decided_by != decided_by:
            own["rmm_plan"] = known = _decided(decided_by)
        if valid is None:
            return known
        plans, key = known.by_valid, (valid, is_pattern)
        if key not in plans:
            plans[key] = _decided(decided_by, valid, is_pattern)
        return plans[key]

    def _note_rows(self, input: Tensor, spec: SaveSpec | None) -> None:
        if self.rmm_context is None or torch.compiler.is_compiling():
            return
        tokens = input.shape[:-1].numel()
        is_other = spec is not None or not torch.is_grad_enabled()  # as in the first pass of a reentrant checkpoint
        if is_other or (self.weight.requires_grad and tokens <= self.rmm_config.min_rows):  # pyright: ignore[reportAttributeAccessIssue]
            self.rmm_context.checks.note_rows(self.rmm_index, None if is_other else tokens)

    def _call(
        self, input: Tensor, weight: Tensor, spec: SaveSpec, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> LinearCall:
        """Return what this call saves, with a seed in every grad mode: both passes of a checkpoint must take one."""
        config, context, index = self.rmm_config, self.rmm_context, self.rmm_index
        if context is None:
            call = LayerCall(shape, input.device)
        else:
            call = context.call_of(index, shape, input.device, config.mask_padding)
        mask = call.mask
        if context is not None and config.mask_padding and self.rmm_estimator is None:
            mask = context.saved_rows(index, call.shape, mask, input.device)
        itemsize = (dtype or input.dtype).itemsize
        valid = None if mask is None or is_capturing(input.device) else mask.valid_count
        is_pattern = mask is not call.mask
        plan = self._plan(input.shape, itemsize, weight, valid, is_pattern)
        spec = plan.spec or spec
        # Set without an estimator too: layers that share the sketch may have one.
        expected = functools.partial(self._expected, call) if spec.samples_rows(call.tokens) else None
        held = None if context is None else context.current_pass  # by the node, for a recomputation
        on_backward = functools.partial(self._on_backward, call, mask, held=held, is_pattern=is_pattern)
        if context is None:
            return LinearCall(spec, draw_seed(), dtype, mask, expected=expected, on_backward=on_backward)
        cache = context.sketch_cache if context.is_open() else None  # outside of a forward pass, nothing clears it
        is_directed = plan.is_directed and not is_capturing(input.device)
        directions = context.directions.get(index) if is_directed else None
        seed = context.layer_seed(index)
        rows = call.tokens if valid is None else valid
        noise = self._noise_of_codes() if spec.rounds_all(rows) and config.memory is None else None
        return LinearCall(spec, seed, dtype, mask, cache, index, expected, on_backward, directions, noise)

    def _take_bits(self, bits: int) -> None:
        self.rmm_config = self.rmm_config.replace(bits=bits)

    def _traced_call(self, input: Tensor, spec: SaveSpec, dtype: torch.dtype | None) -> LinearCall:
        mask = None
        if self.rmm_context is not None and self.rmm_config.mask_padding:
            mask = self.rmm_context.traced_masks.token_mask(input.shape[:-1])
        on_backward = None if mask is None else self._check_traced_padding
        return LinearCall(spec, None, dtype, mask, on_backward=on_backward)

    def _expected(self, call: LayerCall) -> Tensor | None:
        if self.rmm_context is not None:
            return self.rmm_context.expected(self.rmm_index, call)
        return None if self.rmm_estimator is None else self.rmm_estimator.predict(call)

    def _on_backward(
        self,
        call: LayerCall,
        known: TokenMask | None,
        y: Tensor,
        mask: TokenMask | None,
        *,
        held: ForwardPass | None,
        is_pattern: bool,
    ) -> None:
        """Check what a backward pass shows; ``known`` is the mask of this call, whose count the host knows."""
        if is_reverted(self):
            return
        self._note_backward(y, None if mask is None else known, call.shape, is_pattern=is_pattern, held=held)
        if self.rmm_estimator is not None:
            norms = row_norms(y.detach()).float()
            # A step that overflows has no usable norms. Adding zeros costs less than waiting for the device to test it.
            self.rmm_estimator.observe(call, torch.where(norms.isfinite().all(), norms, 0))

    def _describe(self) -> str:
        config = self.rmm_config
        said = [f"kind={config.kind}"]
        said += [f"{name}={value:g}" for name in ("ratio", "memory") if (value := getattr(config, name)) is not None]
        said += [] if config.ratio is not None else [f"bits={config.bits if config.memory else config.width(1, 1)}"]
        said += [f"block={config.block}"] if config.block is not None else []
        said += [f"norm_estimator={config.norm_estimator}"] if self.rmm_estimator is not None else []
        return f"{', '.join(said)}, min_rows={config.min_rows}"


class RMMLinear(SketchedLayer, nn.Linear):
    """A drop-in for ``nn.Linear`` that saves K sketched rows of its input for the backward pass instead of N.

    Exact: the output and the gradients with respect to input and bias. Random and unbiased: the gradient with respect
    to the weight. In eval mode nothing is saved, so a gradient with respect to the weight needs train mode. The
    state_dict is that of ``nn.Linear``.

    Args:
        in_features: I.
        out_features: O.
        bias: Whether the layer adds a bias.
        device: Device of the parameters.
        dtype: dtype of the parameters.
        config: How the input is saved; None is ``RMMConfig()``.

    Example:
        >>> RMMLinear(16, 4, config=RMMConfig(ratio=0.2))
        RMMLinear(in_features=16, out_features=4, bias=True, kind=countsketch, ratio=0.2, min_rows=64)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: RMMConfig | None = None,
    ) -> None:
        """Make a layer with new parameters."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_up(config)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: RMMConfig | None = None) -> RMMLinear:
        """Make a sketched layer that shares the parameters, hooks and mode of an existing one.

        Args:
            linear: An exact ``nn.Linear``; it stays usable, and both train the same Parameter objects.
            config: How the input is saved; None is ``RMMConfig()``.

        Returns:
            The sketched layer.

        Raises:
            TypeError: If ``linear`` is not exactly an ``nn.Linear``.
        """
        if type(linear) is not nn.Linear:
            raise TypeError(f"from_linear takes an nn.Linear and none of its subclasses, got {type(linear).__name__}.")
        layer = cls.__new__(cls)
        layer.__dict__.update(_shared_state(linear))
        layer._set_up(config)
        return layer

    def to_linear(self) -> nn.Linear:
        """Make an ``nn.Linear`` that shares this layer's parameters, hooks and mode.

        Returns:
            The exact layer.
        """
        linear = nn.Linear.__new__(nn.Linear)
        own = {name: value for name, value in _shared_state(self).items() if not name.startswith("rmm_")}
        linear.__dict__.update(own)
        return linear

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            input: Activations, shape (*, I).

        Returns:
            Shape (*, O).
        """
        return self._linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Describe the layer.

        Returns:
            The fields of ``nn.Linear`` and of the sketch.
        """
        return f"{super().extra_repr()}, {self._describe()}"


def _decided(by: tuple[Any, ...], valid: int | None = None, is_pattern: bool = False) -> LinearPlan:
    shape, itemsize, weight_shape, is_trained, config = by
    spec = spec_of(shape, itemsize, weight_shape, is_trained, config, valid)
    if is_pattern and valid is not None and valid <= config.min_rows:  # a row per sequence, as it is
        spec = SaveSpec("countsketch", valid)
    rows = shape[:-1].numel() if valid is None else valid
    is_general = spec is None or spec.kind in SAMPLERS or (spec.bits is None and spec.rows >= rows)
    is_coded = spec is not None and spec.bits is not None and spec.kind == "countsketch" and spec.rows >= rows
    is_directed = is_coded and config.memory is None and Directions(config.directions).fits(shape[-1])
    key = f"{spec!r} {config.directions if is_directed else 0}"
    return LinearPlan(by, spec, is_general, key, is_directed, {})


def _shared_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's state with the same Parameter and hook objects, in containers of its own."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in vars(module).items()}

"""ConvertedModule, the base class of all converted modules: sketched layers, and those that pack activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear.config import RMMConfig, suggested
from rmm_linear.context.learned import GradientRows, largest_of_rows
from rmm_linear.context.left_out import PADDING, POOLED, gradient_in_padding, refuse_padding
from rmm_linear.context.model_context import ModelContext
from rmm_linear.context.recomputation import ForwardPass
from rmm_linear.context.surroundings import in_backward, infers_shapes, is_checkpointed
from rmm_linear.context.survey import Exact
from rmm_linear.layers.function import SavingCall
from rmm_linear.packing import WIDTHS
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed, is_capturing

_TRANSFORMS = (
    "Converted modules work with autograd's backward passes and with torch.compile, got a call by {}. "
    "Call rmm_linear.revert(model) before; to export a model, use torch.export in eval mode."
)


_STAGES = (
    " For pipeline parallelism, make the stages by hand, PipelineStage(module, ...), and convert each of them: "
    "torch.distributed.pipelining.pipeline() exports the model, and its stages have no modules to convert."
)
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # PyTorch 2.6 has none


class ConvertedModule(nn.Module):
    """Base class of converted modules: a configuration, and the module's place in a converted model."""

    rmm_operation: ClassVar[str]  # its operation, one of config.OPERATIONS
    # Whether what it saves of a row is for the gradient of the same row of its output
    rmm_learns_rows: ClassVar[bool] = True
    rmm_config: RMMConfig  # how the module saves its activations
    rmm_context: ModelContext | None  # the context of the converted model, or None for a module outside of one
    rmm_index: int  # index of the module in the converted model
    rmm_mask_checked: bool  # whether a backward pass has shown that masked tokens carry no gradient
    rmm_took_seed: bool  # whether the last call that was no recomputation took a seed
    rmm_least_bits: int = 0  # of its codes, as the first steps have shown

    @classmethod
    def fields_of(cls, original: type[nn.Module]) -> dict[str, Any]:
        """Return what the class that is derived from a module's own has of itself."""
        return {}

    def _set_up(self, config: RMMConfig | None, context: ModelContext | None = None, index: int = 0) -> None:
        if config is not None and not isinstance(config, RMMConfig):
            raise TypeError(f"config must be an RMMConfig or None, got {config!r}. Use {suggested(config)}.")
        self.rmm_config = config or RMMConfig()
        self.rmm_context = context
        self.rmm_index = index
        self.rmm_mask_checked = self.rmm_took_seed = False
        if context is not None and self.rmm_learns_rows and self.rmm_config.mask_padding:
            context.learned[index] = GradientRows()

    def _tear_down(self) -> None:
        for name in [name for name in vars(self) if name.startswith("rmm_")]:
            del self.__dict__[name]

    def __prepare_scriptable__(self) -> None:
        """Refuse torch.jit.script, which calls this."""
        raise RuntimeError(_TRANSFORMS.format("torch.jit.script"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the module's own class does, by the two classes: the one made of them is in no module."""
        found = _PAIRS.get(type(self))
        make, given, *rest = super().__reduce_ex__(max(protocol, 2))
        if found is None:  # made by fully_shard, for example
            return make, given, *rest
        own, given = found[1], tuple(found[1] if one is type(self) else one for one in given)
        make = own if make is type(self) else make
        fields, state = (
            {name: value for name, value in vars(self).items() if name.startswith("rmm_")},
            (rest or [None])[0],
        )
        if not (isinstance(state, dict) and fields.keys() <= state.keys()):
            state = _OwnState(state, fields)
        return _new, (*found, make, given), state, *rest[1:]

    def __setstate__(self, state: Any) -> None:
        """Restore what the module's own class saved, and the fields of the conversion."""
        own, fields = state if isinstance(state, _OwnState) else (state, {})
        vars(self).update(fields)  # its own code may set attributes that they follow
        if own is not None:
            super().__setstate__(own)
        vars(self).update(fields)

    def _unwatched_call(self, shape: tuple[int, ...], device: torch.device, seeded: bool = True) -> SavingCall | None:
        """Return the arguments of a call that :func:`is_unwatched`; None for the general way."""
        own = vars(self)
        if "_is_replica" in own:
            return None
        context = own["rmm_context"]
        if context is None:
            found = draw_seed() if seeded else None, None, None
        else:
            masked, is_checked = own["rmm_config"].mask_padding, own["rmm_mask_checked"]
            found = context.unwatched_call(own["rmm_index"], shape, device, masked, is_checked, seeded)
            if found is None:
                return None
        own["rmm_took_seed"] = seeded  # nn.Module's own assignment takes 3 µs
        seed, mask, forward_pass = found
        learned = None if context is None or mask is None else context.learned.get(own["rmm_index"])
        is_pattern = getattr(learned, "pattern", 0) and own["rmm_config"].mask_padding
        on_backward = functools.partial(self._note_backward, is_pattern=True) if is_pattern else None
        is_masked = mask is not None and not is_pattern
        if is_masked and forward_pass is not None and forward_pass.is_in_turn(own["rmm_index"]):
            on_backward = functools.partial(self._note_backward, held=forward_pass)
        return SavingCall(seed, mask, on_backward, False, forward_pass, is_pattern=bool(is_pattern))

    def _noise_of_codes(self) -> Callable[..., None] | None:
        """Return what a backward pass is to tell of its code's noise; None after the first steps."""
        context = self.rmm_context
        if context is None or not context.noise.is_observing:
            return None
        return functools.partial(context.noise.add, self.rmm_index)

    def _take_bits(self, bits: int) -> None:
        """Take at least so many bits for codes."""
        self.rmm_least_bits = bits

    def _width(self, bits: float) -> float:
        """Return the width of a code that the configuration gives so many bits."""
        return max(bits, self.rmm_least_bits) if bits in WIDTHS else bits

    def _survey(
        self, input: Tensor, output: Tensor, run: Exact | None = None, dims: int = 1, site: int | None = None
    ) -> Tensor:
        """Note a call that saves a code, in the first training step; returns the output."""
        survey = None if self.rmm_context is None or torch.compiler.is_compiling() else self.rmm_context.survey
        if survey is not None:
            survey.note(self, input, output, run, dims, site)
        return output

    def _refuse_transforms(self) -> None:
        """Refuse calls that run the forward pass without the backward pass that activations are compressed for."""
        if torch.compiler.is_compiling():
            if self.training and _is_exporting():
                raise RuntimeError(_TRANSFORMS.format("torch.export in train mode") + _STAGES)
            return
        if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(_TRANSFORMS.format("torch.func or forward-mode differentiation"))
        if torch._C._is_tracing():  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(_TRANSFORMS.format("torch.jit.trace"))
        if "_is_replica" in vars(self):
            raise RuntimeError(
                "Converted modules train in place, got a copy that DataParallel has made, which shares neither seeds "
                "nor masks with the model. Use torch.nn.parallel.DistributedDataParallel."
            )

    def _stays_exact(self, *, seeded: bool = True) -> bool:
        """Say whether a code is of no use to this call, or checkpointing drops it; ``seeded`` as for other calls."""
        if torch.compiler.is_compiling():
            return False
        if self.rmm_context is not None and self.rmm_index in self.rmm_context.kept_anyway:
            return True
        if infers_shapes():
            return True
        if self.rmm_config.checkpointed != "exact":
            return False
        context, is_second, is_dropped = self.rmm_context, in_backward(), is_checkpointed()
        if not is_second:
            vars(self)["rmm_took_seed"] = seeded and not is_dropped  # nn.Module's own assignment takes 3 µs
        if not is_second and not is_dropped:
            return False
        # The first pass of a reentrant checkpoint, without gradients, took a seed. Dropout must repeat its numbers.
        if not is_dropped and self.rmm_took_seed and (context is None or self.rmm_index in context.seeded_alone):
            draw_seed()
        if context is not None:
            context.checks.note_checkpointed(self.rmm_index)
        return True

    def _note_backward(
        self,
        y: Tensor,
        mask: TokenMask | None,
        shape: tuple[int, ...] | None = None,
        *,
        is_pattern: bool = False,
        held: ForwardPass | None = None,
    ) -> None:
        """Check what a backward pass shows: ``y`` is the gradient of the output, shape (N, O), and learn from it."""
        if is_reverted(self):
            return
        context, index = self.rmm_context, self.rmm_index
        if context is not None:
            held = context.note_backward() or held
        if is_capturing(y.device):
            return
        rows = None if context is None or not self.rmm_config.mask_padding else context.rows_of(index)
        if context is not None and is_pattern and mask is not None:
            others = largest_of_rows(y).index_select(0, mask.order[mask.valid_count :])
            context.note_left_out(index, ((others != 0) & others.isfinite()).any())
            self.rmm_mask_checked = True  # by every pass, which takes no part of it on trust
            return
        if rows is not None and shape is not None:
            with _disable_current_modes():  # what counts bytes or operators is to see those of training
                rows.observe(y, shape, mask)
        if mask is None:
            return
        name = "the layer" if context is None else context.names[index]
        if not self.rmm_mask_checked:
            if had := int(gradient_in_padding(y, mask)):
                refuse_padding(name, had)
            # A step proves nothing if it overflows or has no gradient at all, as the first step of LoRA (B = 0) may.
            self.rmm_mask_checked = bool(y.isfinite().all() & (y != 0).any())
        elif held is not None:
            held.look_at_padding(y, mask, name, index)

    def _check_traced_padding(self, y: Tensor, mask: TokenMask | None) -> None:
        """Check the same in compiled code."""
        if mask is not None and not self.rmm_mask_checked:
            padding = y[mask.order]
            is_padding = torch.arange(len(y), device=y.device).unsqueeze(1) >= mask.count
            message = PADDING.format("a layer", *POOLED)
            torch._assert_async(~((padding != 0) & padding.isfinite() & is_padding).any(), message)  # pyright: ignore


def is_reverted(module: nn.Module) -> bool:
    """Say whether a module was converted and is no more, as in a backward pass after ``revert``."""
    return "rmm_config" not in vars(module)


_PAIRS: dict[type, tuple[type[ConvertedModule], type[nn.Module]]] = {}


@functools.cache
def joined_class(converted: type[ConvertedModule], original: type[nn.Module]) -> type[Any]:
    prefix = "RMM" if issubclass(converted, nn.Linear) else "Packed"
    fields = {"__module__": converted.__module__, "rmm_is_joined": True, **converted.fields_of(original)}
    made = type(f"{prefix}{original.__name__}", (converted, original), fields)
    _PAIRS[made] = converted, original
    return made


def original_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a converted module had; other classes as they are."""
    return _PAIRS[kind][1] if kind in _PAIRS else kind


class _OwnState(NamedTuple):
    """The state of a module whose class says itself what that is, and the fields of the conversion."""

    own: Any
    fields: dict[str, Any]


def _new(
    converted: type[ConvertedModule],
    original: type[nn.Module],
    make: Callable[..., Any] = object.__new__,
    given: Iterable[Any] = (),
) -> nn.Module:
    """Make a module by what the module's own class says, or as an empty one."""
    module = make(*(given or (original,)))
    module.__class__ = joined_class(converted, original)
    return module

"""The attention mask, token ids and sample indices of the modules around a layer.

They are read from the calls of the model and of every submodule whose forward takes an ``attention_mask``. An inner
module's mask or ids replace an outer one's for the layers inside.

Masks: a 2-D ``attention_mask`` in the call of a module holds for the layers inside, None means that the layers inside
have no mask, and any other mask changes nothing. A floating one may be additive (:func:`valid_tokens`). Modules that
process rows of two sequences have no mask either: the whole of an encoder-decoder model (the call of its encoder has
the mask again) and a decoder with cross-attention. The same holds for ``input_ids``, except that a call without ids
leaves the outer ones in place.

The sample indices, the examples' positions in the data set, come as ``sample_index`` with the outermost call and are
removed from it: the model's forward does not get them, unless it has a parameter of that name.

In compiled code, a token mask is a pair of tensors, whether or not anything is padded: :class:`TracedMasks`. A block
that is compiled by itself has no mask, and padding stays in its sketch.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear.norm_estimators import LayerCall
from rmm_linear.norm_estimators.samples import SAMPLE_INDEX
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import is_capturing

_MASK = "attention_mask"
_IDS = "input_ids"
_TWO_SEQUENCES = "decoder_attention_mask"
_OTHER_SEQUENCE = "encoder_hidden_states"


@dataclass(eq=False)
class AttentionMask:
    """An attention mask, flattened."""

    flat: Tensor  # shape (N,)
    sequences: int
    # Which tokens are valid; None in a step that is simulated without values. It is made here and not in the layers: in
    # a selective checkpoint, a recomputation must run the same operators as the forward pass.
    tokens_mask: TokenMask | None
    # The number of valid tokens, which the host begins to read when the model is called; None while a graph is captured
    count: HostRead | None = None
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the tokens once, which every layer asks for."""
        self.tokens = len(self.flat)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Say whether rows of a shape are the mask's tokens, as :func:`_fits` does."""
        return _fits((self.sequences, self.tokens), shape)

    @classmethod
    def of(cls, mask: Tensor) -> AttentionMask:
        """Flatten a mask and rank its tokens."""
        flat = mask.detach().reshape(-1)
        if isinstance(mask, FakeTensor):
            return cls(flat, mask.shape[0], None)
        ranks = TokenMask.of(valid_tokens(flat), mask.shape[1])
        return cls(flat, mask.shape[0], ranks, None if is_capturing(flat.device) else HostRead(ranks.count))

    @functools.cached_property
    def ranks(self) -> TokenMask | None:
        """The token mask; None if nothing is padded. The first use waits for the number of valid tokens.

        While a graph is captured, which cannot know the number, it is the mask in any case.
        """
        if self.tokens_mask is None or self.count is None:
            return self.tokens_mask
        self.tokens_mask.know_count(*self.count.values)
        return self.tokens_mask if self.tokens_mask.valid_count < self.tokens else None


@dataclass(frozen=True, eq=False)
class CallInputs:
    """The mask, ids and sample indices that hold inside of a module: its own, or those of the modules around it."""

    mask: AttentionMask | None = None
    input_ids: Tensor | None = None  # token ids, shape (batch, sequence)
    sample_index: Tensor | None = None  # the examples' positions in the data set, int64 of shape (batch,), on the CPU

    def inside(self, module: nn.Module, args: Any, kwargs: Any) -> CallInputs:
        """Return what holds inside of a module, by its call."""
        names = parameters(module)
        if _MASK not in names and _IDS not in names:
            return self
        argument, has_parameter = mask_argument(names, args, kwargs)
        mask = self._mask(argument) if has_parameter else self.mask
        ids = None if _TWO_SEQUENCES in names else _argument(names, _IDS, args, kwargs)
        is_text = isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point()
        if _TWO_SEQUENCES not in names and not is_text:
            ids = self.input_ids
        return self if mask is self.mask and ids is self.input_ids else CallInputs(mask, ids, self.sample_index)

    def _mask(self, argument: Any) -> AttentionMask | None:
        outer = self.mask
        if argument is None:
            return None
        if not isinstance(argument, Tensor) or argument.dim() != 2:
            return outer
        is_same = outer is not None and _place(outer.flat) == _place(argument) and argument.is_contiguous()
        if outer is not None and is_same and outer.flat.numel() == argument.numel():
            return outer
        return AttentionMask.of(argument)

    def fitting(self, shape: tuple[int, ...]) -> CallInputs:
        """Keep the mask and the ids only if they are of the rows of a layer's input, whose leading shape this is."""
        mask, ids = self.mask, self.input_ids
        mask = mask if mask is not None and mask.fits(shape) else None
        ids = ids if ids is not None and _fits((len(ids), ids.numel()), shape) else None
        return self if mask is self.mask and ids is self.input_ids else CallInputs(mask, ids, self.sample_index)

    def layer_call(self, shape: tuple[int, ...], device: torch.device, masked: bool) -> LayerCall:
        """Describe a call of a layer to norm estimators."""
        ids, mask, index = self.input_ids, self.mask, self.sample_index
        if len(shape) < 2 and ids is not None:
            shape = tuple(ids.shape)
        elif len(shape) < 2 and mask is not None and mask.sequences:
            shape = (mask.sequences, len(mask.flat) // mask.sequences)
        return LayerCall(
            tuple(shape),
            device,
            None if ids is None else ids.detach().reshape(-1),
            index if index is not None and len(shape) > 1 and len(index) == shape[0] else None,
            mask.ranks if masked and mask is not None else None,
        )


def valid_tokens(mask: Tensor) -> Tensor:
    """Return which tokens a mask keeps, bool.

    A floating mask of other values than 0 and 1, or of zeros alone, is added to scores: it hides where it is negative.
    The host reads nothing.
    """
    if not mask.is_floating_point():
        return mask.bool()
    ones = mask == 1
    return torch.where(ones.any() & (ones | (mask == 0)).all(), ones, mask >= 0)


def take_sample_index(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """Take the sample indices out of the outermost call's arguments, unless its forward has a parameter for them."""
    argument = kwargs.get(SAMPLE_INDEX)
    if SAMPLE_INDEX not in parameters(module):
        kwargs = {name: value for name, value in kwargs.items() if name != SAMPLE_INDEX}
    if argument is None:
        return None, kwargs
    index = torch.as_tensor(argument, device="cpu")
    if index.dim() != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise TypeError(
            f"{SAMPLE_INDEX} must have one integer for each example of the batch, got {index.dtype} of the shape "
            f"{tuple(index.shape)}. rmm_linear.estimators.with_sample_index makes it."
        )
    return index.detach().to(torch.int64), kwargs


def _fits(of: tuple[int, int], shape: tuple[int, ...]) -> bool:
    """Say whether rows of a shape are those of a number of sequences and tokens, in this order.

    Not so where a module has transposed them to (sequence length, batch), as Longformer's attention does.
    """
    sequences, tokens = of
    is_transposed = len(shape) == 2 and shape[1] == sequences != shape[0]
    return math.prod(shape) == tokens and not is_transposed


def _place(tensor: Tensor) -> int:
    """Return a tensor's address; of a fake one, which has no memory, that of its storage object."""
    return tensor.untyped_storage()._cdata if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def takes_mask(module: nn.Module) -> bool:
    return _MASK in parameters(module)


def parameters(module: nn.Module) -> tuple[str, ...]:
    return _names(type(module).forward)


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # cached: takes tens of microseconds, in every step


def mask_argument(names: tuple[str, ...], args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Return the attention mask among the arguments of a call, and whether the module has a parameter for one."""
    if _MASK not in names:
        return None, False
    two = _TWO_SEQUENCES in names or _argument(names, _OTHER_SEQUENCE, args, kwargs) is not None
    return None if two else _argument(names, _MASK, args, kwargs), True


def _argument(names: tuple[str, ...], name: str, args: Any, kwargs: Any) -> Any:
    """Return an argument of a call, by keyword or position; None if the call has none of this name."""
    if name in kwargs:
        return kwargs[name]
    if len(args) < 2 and name not in names[: len(args)]:  # most calls of inner modules
        return None
    position = names.index(name) if name in names else len(args)
    return args[position] if position < len(args) else None


@dataclass
class TracedMasks:
    """The attention masks that hold in the modules of a compiled forward pass; empty before and after it."""

    # Pairs of a mask, or None for no mask, and the module whose call set it; the innermost last. Modules that leave the
    # mask unchanged have no entry: a checkpoint inside of a graph may change nothing outside of itself.
    masks: list[tuple[Tensor | None, nn.Module]] = field(default_factory=list)

    def enter(self, module: nn.Module, names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        self.exit(module)  # if an earlier call has failed
        argument, has_parameter = mask_argument(names, args, kwargs)
        outer = self.masks[-1][0] if self.masks else None
        if isinstance(argument, Tensor) and argument.dim() == 2 and argument is not outer:
            self.masks.append((argument, module))
        elif has_parameter and argument is None and outer is not None:
            self.masks.append((None, module))
        if SAMPLE_INDEX in names or SAMPLE_INDEX not in kwargs:
            return kwargs
        return {name: value for name, value in kwargs.items() if name != SAMPLE_INDEX}

    def exit(self, module: nn.Module) -> None:
        if self.masks and self.masks[-1][1] is module:
            self.masks.pop()

    def token_mask(self, shape: tuple[int, ...]) -> TokenMask | None:
        """Return the mask for a layer whose input has rows of a shape, even if nothing is padded; or None."""
        mask = self.masks[-1][0] if self.masks else None
        if mask is None or not _fits((len(mask), mask.numel()), shape):
            return None
        return TokenMask.of(valid_tokens(mask.detach().reshape(-1)))


def waits(device: torch.device) -> bool:
    """Say whether the host waits where it reads a number from a device."""
    return device.type != "cpu"


class HostRead:
    """A few integers on their way to the host, from the moment that this is made."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy ``values``, of one dimension."""
        self._values, self._event, self.device = values, None, values.device
        if values.is_cuda:
            try:
                place = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            except RuntimeError:  # no pinned memory is left, as in containers and WSL: the first use copies
                return
            self._values, self._event = place.copy_(values, non_blocking=True), torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))  # of that device, whichever is the current one

    @functools.cached_property
    def values(self) -> list[int]:
        """The integers; the first use waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()

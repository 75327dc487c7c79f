"""What the layers of a converted model share during one forward pass: the seeds, the token mask, the sketches.

Forward passes are seen by hooks on the model and on every submodule whose forward takes an ``attention_mask``; the
outermost of them that runs is the step, so wrappers that call ``forward`` directly (PEFT's) do no harm.

Seeds: the step's seed is *read* from the global generator's state when the first layer asks, and the generator moves on
only when the forward pass is over. So nothing random inside (dropout) sees a difference between the converted and the
original model, with or without gradients.

Masks: a module that is given a 2-D ``attention_mask`` makes it known to the layers inside, one that is given None makes
none known, and any other mask changes nothing. Modules that see rows of two sequences make none known either: the whole
of an encoder-decoder model (its encoder is given its mask again) and a decoder with cross-attention.

Activation checkpointing runs parts of the model again inside the backward pass. No step is open then: layers take
further seeds from the last step's, and the mask of the forward passes that wait for their backward pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rmm_linear.bits import BitsChoice
from rmm_linear.compiled import TracedPass
from rmm_linear.seeds import draw_seed, mix, peek_seed
from rmm_linear.sharing import SharedSketches
from rmm_linear.sketches import TokenMask

_ARGUMENT = "attention_mask"
_TWO_SEQUENCES = "decoder_attention_mask"
_OTHER_SEQUENCE = "encoder_hidden_states"
_MOST_WAITING = 64  # forward passes remembered until a backward pass; who never runs one must not fill the memory


@dataclass(eq=False)
class _Mask:
    """An attention mask, flattened; its ranks are made when the first layer asks."""

    flat: Tensor
    sequences: int
    ranks: TokenMask | None = None

    def token_mask(self) -> TokenMask | None:
        if self.ranks is None:
            self.ranks = TokenMask.of(self.flat)
        padded = self.flat.device.type != "cpu" or int(self.ranks.count) < len(self.flat)
        return self.ranks if padded else None


class ForwardScope:
    """What one converted model's layers share.

    Attributes:
        names: Name of every converted layer; its place is the layer's number.
        choices: Width chosen by every layer with ``bits="auto"``, by number.
        shared: Sketches of the running forward pass, and the groups of layers that share one.
        traced: What the layers share in compiled code, in place of all the rest.
    """

    def __init__(self, names: list[str] | None = None) -> None:
        """Make a scope that no model uses yet.

        Args:
            names: Names of the layers.
        """
        self.names = names or []
        self.choices: dict[int, BitsChoice] = {}
        self.shared = SharedSketches()
        self._handles: list[RemovableHandle] = []
        self._released = 0
        self._reset()

    def _reset(self) -> None:
        self.traced = TracedPass()
        self._masks: list[_Mask | None] = []
        self._outermost: nn.Module | None = None
        self._waiting: dict[int, deque[_Mask | None]] = {}
        self._backward_seen = False
        self._recomputing = False
        self._count = 0
        self._seeded = False
        self._step_seed: int | None = None
        self._drew: set[int] = set()

    def attach(self, model: nn.Module) -> None:
        """Open the scope around every forward pass of ``model``.

        Args:
            model: The model whose layers share this scope.
        """
        for module in model.modules():
            if module is model or _takes_mask(module):
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._exit, always_call=True),
                ]

    def attach_inside(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Open the scope in a forward pass of ``model`` that has begun, and around the following ones.

        Args:
            model: The model.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        self.attach(model)
        self._enter(model, args, kwargs)  # PyTorch made the list of this call's hooks before

    def detach(self) -> None:
        """Remove the scope from its model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.shared.clear()

    def release(self) -> None:
        """Note that one layer left the scope; after the last one, remove it from its model."""
        self._released += 1
        if self._released >= len(self.names):
            self.detach()

    def is_open(self) -> bool:
        """Say whether a forward pass of the model, or its recomputation, is running.

        Returns:
            False when a layer is called by itself, or the model's ``forward`` not through a call.
        """
        return bool(self._masks) or in_backward()

    def layer_seed(self, index: int) -> int:
        """Return a fresh seed for one call of one layer.

        Args:
            index: Number of the layer in the model.

        Returns:
            A seed no other call of this step has.
        """
        if not in_backward():
            if not self._masks:
                self._drew.add(index)
            else:
                self._drew.discard(index)
                if not self._seeded:
                    self._step_seed, self._count, self._seeded = peek_seed(), 0, True
        if self._step_seed is None or index in self._drew:  # a recomputation draws where the first pass drew
            return draw_seed()
        self._count += 1
        return mix(self._step_seed, index, self._count)

    def token_mask(self, tokens: int, index: int) -> TokenMask | None:
        """Return the mask for a layer that sees ``tokens`` rows.

        Args:
            tokens: N.
            index: Number of the layer in the model.

        Returns:
            The mask, or None if there is none, it has another size, or nothing is padded.

        Raises:
            RuntimeError: If a recomputation cannot tell which of several forward passes it belongs to.
        """
        waiting = self._waiting.setdefault(index, deque(maxlen=_MOST_WAITING))
        if not in_backward():
            mask = self._masks[-1] if self._masks else None
            mask = mask if mask is not None and len(mask.flat) == tokens else None
            waiting.append(mask)
            return None if mask is None else mask.token_mask()
        fitting = [mask for mask in waiting if mask is None or len(mask.flat) == tokens]
        if any(not _same(mask, fitting[0]) for mask in fitting):
            raise RuntimeError(
                f"Activation checkpointing recomputes {self.names[index]}, and several forward passes with different "
                "attention masks wait for their backward pass: the layer cannot tell which is its own. Run backward "
                "after every forward, or convert with mask_padding=False."
            )
        return fitting[0].token_mask() if fitting and fitting[0] is not None else None

    def known_mask(self, tokens: int) -> Tensor | None:
        """Return the mask that holds now, outside of a recomputation, for whoever wants to look and leave no trace.

        Args:
            tokens: N.

        Returns:
            Shape (batch, sequence), or None if there is no mask for ``tokens`` rows.
        """
        mask = self._masks[-1] if self._masks else None
        return None if mask is None or len(mask.flat) != tokens else mask.flat.view(mask.sequences, -1)

    def choice(self, index: int) -> BitsChoice:
        """Return a layer's choice of bits.

        Args:
            index: Number of the layer.

        Returns:
            The choice, made when the layer asks first.
        """
        return self.choices.setdefault(index, BitsChoice())

    def note_backward(self) -> None:
        """Remember that the backward pass of the last forward pass has begun."""
        self._backward_seen = True

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced.enter(*self._given_mask(module, args, kwargs))
            return
        # No hook runs after a KeyboardInterrupt: what an interrupted call left behind is thrown away.
        left = self._recomputing and not in_backward()
        if self._masks and (left or (module is self._outermost and not _is_running(module))):
            self._masks.clear()
            self.shared.clear()
        if not self._masks:
            self._outermost = module
            self._recomputing = in_backward()
            if not self._recomputing:
                self._open_step()
        self._masks.append(self._known_mask(module, args, kwargs))

    def _open_step(self) -> None:
        self._seeded = False  # the last step's seed stays, for recomputations that come after an eval pass
        self.shared.clear()
        if self._backward_seen:
            self._waiting.clear()
            self._backward_seen = False
            for choice in self.choices.values():
                choice.settle()

    def _known_mask(self, module: nn.Module, args: Any, kwargs: Any) -> _Mask | None:
        outer = self._masks[-1] if self._masks else None
        given, is_known = self._given_mask(module, args, kwargs)
        if not is_known:
            return outer
        if given is None:
            return None
        if not isinstance(given, Tensor) or given.dim() != 2:
            return outer
        flat = given.detach().reshape(-1)
        if outer is not None and outer.flat.data_ptr() == flat.data_ptr() and outer.flat.shape == flat.shape:
            return outer
        return _Mask(flat, given.shape[0])

    def _given_mask(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """The mask that a module is given, None for none, and whether it says anything about masks."""
        if not _takes_mask(module):
            return None, False
        other = _argument(module, _OTHER_SEQUENCE, args, kwargs)
        if other is not None or _TWO_SEQUENCES in _parameters(module):
            return None, True
        return _argument(module, _ARGUMENT, args, kwargs), True

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced.exit()
            return
        if self._masks:
            self._masks.pop()
        if not self._masks:
            self._outermost = None
            self.shared.clear()
            if self._seeded and not self._recomputing:
                draw_seed()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the running forward pass behind."""
        lasting = ("names", "choices", "shared", "_handles", "_released")
        return {name: value for name, value in vars(self).items() if name in lasting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no forward pass running."""
        vars(self).update(state)
        self._reset()


def _same(first: _Mask | None, second: _Mask | None) -> bool:
    if first is None or second is None or first is second:
        return first is second
    return torch.equal(first.flat, second.flat)


def _parameters(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of the module's forward, without self."""
    return _names(type(module).forward)


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # tens of microseconds, asked in every step


def _takes_mask(module: nn.Module) -> bool:
    return _ARGUMENT in _parameters(module)


def _is_running(module: nn.Module) -> bool:
    """Whether a call of the module lies below the one that has just begun, as in a module that calls itself."""
    calls, frame = 0, sys._getframe()
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _argument(module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    """An argument of a call of the module, by keyword or position; None if it was not given."""
    if name in kwargs:
        return kwargs[name]
    parameters = _parameters(module)
    position = parameters.index(name) if name in parameters else len(args)
    return args[position] if position < len(args) else None


def in_backward() -> bool:
    """Say whether a backward pass is running, as it is while activation checkpointing recomputes.

    Returns:
        True inside the backward pass.
    """
    return torch._C._current_graph_task_id() != -1

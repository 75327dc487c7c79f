"""PackedModule, the base class of modules that save packed activations."""

from __future__ import annotations

import functools
import inspect
import sys

import torch
from torch import nn

from rmm_linear.context.surroundings import is_unwatched
from rmm_linear.layers.converted import ConvertedModule, original_of
from rmm_linear.layers.function import SavingCall
from rmm_linear.sketches.seeds import draw_seed, is_capturing


def is_setting(name: str, value: object) -> bool:
    """Say whether an attribute, given another value, may change what a module computes."""
    return isinstance(value, int | float | str) and name != "training" and not name.startswith(("_", "rmm_"))


def changes_setting(module: nn.Module, name: str, value: object) -> bool:
    """Say, in ``__setattr__`` before it sets an attribute, whether a setting gets another value.

    What the module's own forward sets, as one that counts its calls, is no setting.
    """
    if not is_setting(name, value):
        return False
    before = getattr(module, name, value)
    own = inspect.unwrap(original_of(type(module)).forward)
    is_own = sys._getframe(2).f_code is getattr(own, "__code__", None)
    return not is_own and (not is_setting(name, before) or before != value)


class PackedModule(ConvertedModule):
    """Base class of modules that save packed activations. Used through :func:`joined_class`."""

    rmm_sees_many = False  # rows, in a call of its own code

    def _note_call(self, reason: str | None) -> None:
        """Keep for the report why a call is exact; None of one that is not."""
        if self.rmm_context is not None and not torch.compiler.is_compiling():
            known = self.rmm_context.exact_calls
            if reason is not None:
                known[self.rmm_index] = reason
            elif self.rmm_index in known:
                del known[self.rmm_index]

    def _note_rows(self, are_many: bool) -> None:
        """Keep for the report that all calls in its own code see few rows, until one sees many."""
        if torch.compiler.is_compiling() or self.rmm_sees_many:
            return
        if are_many:
            self.rmm_sees_many = True
        few = f"its code's calls see at most min_rows={self.rmm_config.min_rows} rows"
        self._note_call(None if are_many else few)

    def _packed_call(self, shape: tuple[int, ...], device: torch.device, *, seeded: bool = True) -> SavingCall:
        """Return what a call needs. Call it in train mode in every grad mode: both passes of a checkpoint must."""
        found = self._unwatched_call(shape, device, seeded) if is_unwatched() else None
        if found is not None:
            return found
        self._refuse_transforms()
        if self._stays_exact(seeded=seeded):
            return SavingCall(is_exact=True)
        context, index = self.rmm_context, self.rmm_index
        if torch.compiler.is_compiling():
            # Shapes are static in compiled code, so padding cannot be left out; operators draw by themselves there, and
            # the ranks of a tensor parallel group would not draw alike.
            return SavingCall(is_exact=context is not None and context.ranks.are_several)
        if context is None:
            return SavingCall(draw_seed() if seeded else None)
        mask, is_pattern = context.mask_of(index, shape, device, self.rmm_config.mask_padding)
        mask = None if is_capturing(device) else mask  # its length cannot be read while a graph is captured
        seed = context.layer_seed(index) if seeded else None
        held = context.current_pass
        on_backward = functools.partial(self._note_backward, shape=shape, is_pattern=is_pattern, held=held)
        noise = self._noise_of_codes()
        return SavingCall(seed, mask, on_backward, forward_pass=held, noise=noise, is_pattern=is_pattern)

"""Attention with code of its own: a region between a module's linear layers that runs again in the backward pass.

A module calls linear layers (the *sources*), then computes anything that has a softmax, then calls another linear
layer (the *sink*) or returns. The region is everything between. Its forward pass is the module's own code with
gradients off, so its output is the module's to the bit, whichever kernel it calls, with dropout too. It saves the
outputs of the sources in few bits, less the mean of each sequence, with the mean (:mod:`rmm_linear.ops.regions`). In
the backward pass the module's own code runs again on the decoded values, with the random numbers it had, stops at the
sink, and autograd computes the gradients with respect to the sources' outputs, to parameters that are read between, and
to arguments that reach the region by another way. Nothing else is saved: no scores, probabilities or masks of dropout.

The gradient of a source's weight follows from that of its output, so its noise is that of the codes, and as for
:mod:`rmm_linear.packing.attention`, softmax of decoded values is biased by less than that: codes have 8 bits where the
scores spread far. Time: one more forward pass of the region.

What a region is, is seen in the first call of a class in training (:func:`~rmm_linear.activations.region_form.look`),
which runs the module exactly, and then as a region that saves uncoded values: its output and its gradients must be
those of autograd. Where they are not, the module stays exact and says so.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from rmm_linear.activations.attention import AttendingModule, note_attended
from rmm_linear.activations.attention_function import why_elsewhere
from rmm_linear.activations.own_forward import has_hooks_of_others
from rmm_linear.activations.region_arguments import Arguments
from rmm_linear.activations.region_form import look
from rmm_linear.activations.region_run import Different, Filled, RegionForm, RegionRun, Scores
from rmm_linear.config import RMMConfig
from rmm_linear.context.learned import ScoreSpread, read_all
from rmm_linear.context.surroundings import in_backward
from rmm_linear.sketches.seeds import draw_seed, is_capturing, seeds_of

logger = logging.getLogger(__name__)

_WIDE = 8  # bits where scores spread far
_TOO_LARGE = "its scores are so large that even codes of 8 bits would bias its gradient"
_CHANGING = "it calls its linear layers otherwise from call to call"
_DIVIDED = (
    "Attention with code of its own runs outside of compiled code, which is divided around it: %s is the first. With "
    "fullgraph=True, leave 'attention' out of operations, or use attn_implementation='sdpa' where the model has it."
)
_CHOICES = re.compile("topk|argmax|argsort|multinomial")
_NAMES = re.compile("softmax|scaled_dot_product|ALL_ATTENTION_FUNCTIONS|flash_attn|flex_attention")


class PackedRegion(AttendingModule):
    """A module whose attention is a region. The output is the module's own to the bit."""

    rmm_linears: tuple[str, ...]  # names of the children that are linear layers
    rmm_form: RegionForm | None  # what is known of this module alone; None if it does what its class does

    def _set_up(self, config: RMMConfig | None, *arguments: Any, linears: Sequence[str] = (), **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        self.rmm_linears, self.rmm_form = tuple(linears), None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in training as a region; outside of compiled code."""
        if not self.training:
            return super().forward(*args, **kwargs)
        return (_run_uncompiled if torch.compiler.is_compiling() else PackedRegion._run)(self, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        original = super().forward
        note_attended(self)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = next((one for one in tensors if one.is_floating_point()), None)
        if first is None:
            return original(*args, **kwargs)
        call = self._packed_call(tuple(first.shape[:-1]), first.device)
        call.mask = None  # keys of padding may be seen
        is_saving = torch.is_grad_enabled() and any(
            one.requires_grad for tensors in (tensors, self.parameters()) for one in tensors
        )
        if call.is_exact or not is_saving or not first.numel():
            return original(*args, **kwargs)
        arguments: Arguments = {**dict(enumerate(args)), **kwargs}
        spread = self._spread
        reason = _TOO_LARGE if spread is not None and spread.is_too_large else None
        reason = reason or why_elsewhere(*tensors) or _why_exact(first.device)
        if reason is None and has_hooks_of_others(self, self.rmm_linears, ("_forward_hooks",)):
            reason = "hooks of its linear layers may keep outputs that have no graph in it"
        form = None if reason else self._form(original, arguments)
        self._note_exact(reason or (form.reason if form else None))
        if form is None or form.reason:
            return original(*args, **kwargs)
        seed = draw_seed() if call.seed is None else call.seed
        bits = _WIDE if spread is not None and spread.is_large else self._bits
        run = RegionRun(self, self.rmm_linears, original, form, arguments, call, seeds_of(seed, form.calls), bits)
        run.scores = None if in_backward() or isinstance(first, FakeTensor) else self._scores
        try:
            with run.scores or nullcontext():
                output = run.forward()
        except Filled:
            self._note_exact("its KV cache is not empty")
            return original(*args, **kwargs)
        except Different:  # it does not do what others of its class do
            again = None if self.rmm_form is None else RegionForm(reason=_CHANGING)
            vars(self)["rmm_form"] = again or look(self, self.rmm_linears, original, arguments)
            return original(*args, **kwargs)
        self._note_whole(run.why_whole)
        if run.errors is not None and spread is not None:
            spread.observe_errors(run.errors)
            run.errors = None
            if not (spread.is_observing or self.rmm_context is None or self.rmm_context.is_open()):
                read_all([spread])  # compiled code around it opens no forward pass that does
        return output

    def _note_whole(self, reason: str | None) -> None:
        """Say once for a model why a replay that saves much is not divided."""
        said = self.rmm_context.checks.said if self.rmm_context is not None else set[str]()
        if reason is not None and f"whole: {reason}" not in said:
            said.add(f"whole: {reason}")
            logger.warning(
                "The attention of %s runs again for all sequences at once, which takes much memory in the backward "
                "pass: %s. Further modules with the same reason are not named.",
                type(self).__name__ if self.rmm_context is None else self.rmm_context.names[self.rmm_index],
                reason,
            )

    def _form(self, original: Callable[..., Any], arguments: Arguments) -> RegionForm:
        """Return what is known of the module's class; a simulated step, which has no values, checks nothing."""
        if self.rmm_form is not None:
            return self.rmm_form
        known: dict[Any, RegionForm] = {} if self.rmm_context is None else self.rmm_context.regions
        # Flags are what modules of one class differ in, as by their layer.
        flags = ((name, value) for name, value in vars(self).items() if type(value) is bool and name[:4] != "rmm_")
        # One sequence does not show which tensors have them first.
        leaves = tree_leaves(arguments)
        is_alone = next((len(one) for one in leaves if isinstance(one, Tensor) and one.dim()), 0) < 2
        key = type(self), self.rmm_linears, is_alone, *flags
        form = known.get(key)
        if form is None:
            fake = next((leaf for leaf in leaves if isinstance(leaf, FakeTensor)), None)
            with _disable_current_modes(), nullcontext() if fake is None else fake.fake_mode:  # counts nothing of it
                form = look(self, self.rmm_linears, original, arguments, is_checked=fake is None)
            if fake is None:
                known[key] = form
                vars(self)["rmm_form"] = form if self.rmm_context is None else None
        return form

    @property
    def _scores(self) -> Scores | None:
        return Scores() if self._spread is not None and self._spread.is_observing else None

    @property
    def _spread(self) -> ScoreSpread | None:
        spread = None if self.rmm_context is None else self.rmm_context.learned.get(self.rmm_index)
        return spread if isinstance(spread, ScoreSpread) else None


def _run_divided(module: PackedRegion, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = module.rmm_context
    if context is not None and _DIVIDED not in context.checks.said:
        context.checks.said.add(_DIVIDED)
        logger.warning(_DIVIDED, context.names[module.rmm_index])
    return module._run(args, kwargs)


# Compilers do not trace autograd inside of a function of it.
_run_uncompiled: Any = torch.compiler.disable(_run_divided)


def reads_softmax(module: nn.Module) -> bool:
    """Say whether a module's own code, or functions and methods that it names, name a softmax or an attention."""
    forward = inspect.unwrap(type(module).forward)
    found, seen = [forward], set[Any]()
    for _ in range(3):
        codes = [one.__code__ for one in found if hasattr(one, "__code__") and one.__code__ not in seen]
        names = {name for code in codes for name in (*code.co_names, *code.co_varnames)}
        if any(_CHOICES.search(name) for name in names):
            return False  # decoded scores would choose otherwise
        if any(_NAMES.search(name) for name in names):
            return True
        seen |= set(codes)
        spaces = [getattr(one, "__globals__", {}) for one in found]
        found = [space[name] for space in spaces for name in names if inspect.isfunction(space.get(name))]
        found += [one for name in names if inspect.isfunction(one := getattr(type(module), name, None))]
        if "super" in names:
            found += [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    return False


def _why_exact(device: torch.device) -> str | None:
    if is_capturing(device):
        return "a CUDA graph is captured, in which the state that dropout is drawn from cannot be read"
    return None

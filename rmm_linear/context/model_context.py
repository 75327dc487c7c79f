"""Share seeds, masks, token ids and sketches among the layers of a converted model during a forward pass.

Hooks on the model and on every submodule whose forward takes an ``attention_mask`` note where a forward pass begins and
ends. The outermost of these modules that runs is the step, so wrappers that call ``forward`` directly (as PEFT's do)
are no problem. ``call_inputs.py`` reads the arguments of these modules.

Seeds: the step's seed is *read* from the state of the global generator when the first layer needs it, and the generator
advances only after the forward pass. So the random numbers inside of it (dropout) are the same in the converted and the
original model, with or without gradients.

Activation checkpointing recomputes parts of the model inside of the backward pass, when no step is running. The layers
then use the seeds, masks and ids of their own forward pass (``recomputation.py``).
"""

from __future__ import annotations

import functools
import math
import random
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from rmm_linear.config import RMMConfig
from rmm_linear.context.call_inputs import (
    AttentionMask,
    CallInputs,
    TracedMasks,
    parameters,
    take_sample_index,
    takes_mask,
    valid_tokens,
)
from rmm_linear.context.code_noise import ROUNDS, CodeNoise
from rmm_linear.context.directions import Directions
from rmm_linear.context.first_steps import MOST_WAITS, StepChecks
from rmm_linear.context.learned import STEPS, GradientRows, Learned, read_all
from rmm_linear.context.ranks import Ranks
from rmm_linear.context.recomputation import ForwardPass, PendingForwards, RunningForward, StepSeeds
from rmm_linear.context.sketch_cache import SketchCache
from rmm_linear.context.surroundings import in_backward, infers_shapes, is_called_inside_itself, runs_again
from rmm_linear.context.survey import Survey
from rmm_linear.norm_estimators import LayerCall, NormEstimator
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.seeds import draw_seed, is_capturing


def _nothing() -> None:
    """Stand for a reference to a module that is gone."""


class ModelContext:
    """The state that the layers of one converted model share; dictionaries are by a layer's index."""

    def __init__(self, names: list[str] | None = None, config: RMMConfig | None = None) -> None:
        """Make a context that is not attached to a model yet."""
        self.names = names or []  # of every converted layer, at its index
        self.config = config or RMMConfig()
        self.estimators: dict[int, NormEstimator] = {}
        self.learned: dict[int, Learned] = {}
        self.directions: dict[int, Directions] = {}
        self.sketch_cache = SketchCache()
        self.kept_anyway: set[int] = set()  # modules that are exact, as others keep what their codes were to free
        self.kept_sites: set[tuple[int, int]] = set()  # the same of calls in modules' own code, by index and place
        self.noise = CodeNoise()
        self.exact_calls: dict[int, str] = {}  # why the last call of an attention, a norm, or of functions was exact
        self.salt, self._released = 0, 0  # another salt gives other seeds, and leaves the model's own numbers alone
        self._handles: list[RemovableHandle] = []
        self._root: Callable[[], nn.Module | None] = _nothing
        self._signatures: dict[type[nn.Module], tuple[str, ...]] = {}
        self._reset()

    def _reset(self) -> None:
        # Passes in a row that began while others had no backward pass yet, and the first steps were to be read.
        self.traced_masks, self.waits = TracedMasks(), 0
        self.checks = StepChecks(self.names, self.config.min_rows)
        self._running = RunningForward()
        self._pending, self.ranks = PendingForwards(), Ranks()
        self.seeds = self._last_seeds = StepSeeds()
        self._row_masks: dict[tuple[Any, ...], TokenMask | None] = {}  # of this forward pass
        self._turns = random.Random(0)  # of the modules that look at their padding
        self.seeded_alone: set[int] = set()  # layers whose last seed was drawn outside of a pass of the model
        self.regions: dict[Any, Any] = {}  # what is known of classes of modules whose attention is a region

    def attach(self, model: nn.Module) -> None:
        """Register the hooks that open this context around every forward pass of ``model``."""
        self.ranks.look(model)
        self._root = weakref.ref(model)
        for module in model.modules():
            if module is model or takes_mask(module):
                # By the class that has the forward: a converted module's own class is in no module, and not pickled.
                kinds = (kind for kind in type(module).__mro__ if "rmm_is_joined" not in vars(kind))
                owner = next(kind for kind in kinds if "forward" in vars(kind))
                self._signatures[owner] = parameters(module)
                self._handles += [
                    module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
                    module.register_forward_hook(self._exit, always_call=True),
                ]

    def attach_inside(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Open this context in the current forward pass of ``model``, and around the following ones."""
        self.attach(model)
        self._enter(model, args, kwargs)  # PyTorch has already listed the hooks of this call

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.sketch_cache.clear()
        self._pending.left_out.end()

    def release(self) -> None:
        """Note that one layer was reverted; after the last one, remove the hooks from the model."""
        self._released += 1
        if self._released >= len(self.names):
            self.detach()

    def is_attached_inside(self, model: nn.Module) -> bool:
        """Say whether the model that was converted is a module, or inside of it; copies do not know it."""
        return (root := self._root()) is not None and any(one is root for one in model.modules())

    def is_open(self) -> bool:
        """Say whether a forward pass of the model, or its recomputation, is running."""
        return bool(self._running.inputs) or in_backward()

    @property
    def survey(self) -> Survey | None:
        """What modules would keep that save codes; None but in the forward pass of the first training step."""
        return self._running.survey

    @property
    def outermost(self) -> nn.Module | None:
        """The module whose forward pass, or its recomputation, is running; None outside of one."""
        return self._running.outermost

    def layer_seed(self, index: int) -> int:
        """Return a seed that no other call of this step has; in a recomputation, that of its call."""
        if in_backward():  # a recomputation draws a seed if its first pass did
            if index in self.seeded_alone:
                return draw_seed()
            first = self._pending.find()
            last = self.seeds if self.seeds.step is not None else self._last_seeds
            return (last if first is None else first.seeds).repeat(index)
        if not self._running.inputs:
            self.seeded_alone.add(index)
            if torch.is_grad_enabled() and self._root() is not None and not runs_again():
                self.checks.note_alone(index)
            return draw_seed()
        self.seeded_alone.discard(index)
        return self.seeds.take(index, self.salt)

    def unwatched_call(
        self, index: int, shape: tuple[int, ...], device: torch.device, masked: bool, is_checked: bool, seeded: bool
    ) -> tuple[int | None, TokenMask | None, ForwardPass] | None:
        """Return the seed, mask and forward pass of a call of a layer that is unwatched, and so is never recomputed.

        None outside of a forward pass of the model, in its first steps, with padding that no backward pass has checked
        yet, and while a graph is captured. The seed is None where the layer needs none.
        """
        held, inputs = self._pending.current, self._running.inputs
        if held is None or not inputs or not self.checks.is_done or index in self.kept_anyway:
            return None
        if self.noise.rounds < ROUNDS:
            return None
        mask = inputs[-1].mask if masked else None
        ranks = None if mask is None or not mask.fits(shape) else mask.ranks
        if (learned := self.learned.get(index)) is not None:
            if learned.steps < STEPS:
                return None
            if masked and getattr(learned, "pattern", 0):
                ranks = self.saved_rows(index, shape, ranks, device, mask)
        if ranks is not None and (not is_checked or is_capturing(device)):
            return None
        self.seeded_alone.discard(index)
        return held.seeds.take(index, self.salt) if seeded else None, ranks, held

    def call_of(self, index: int, shape: tuple[int, ...], device: torch.device, masked: bool) -> LayerCall:
        """Return the mask and ids of a call of a layer, and remember them for its recomputation."""
        return self._inputs_of(index, shape, masked).layer_call(shape, device, masked)

    def mask_of(
        self, index: int, shape: tuple[int, ...], device: torch.device, masked: bool
    ) -> tuple[TokenMask | None, bool]:
        """Return the rows to save, all for None, and whether :meth:`saved_rows` has left out more than padding."""
        mask = self._inputs_of(index, shape, masked).mask
        if not masked:
            return None, False
        valid = mask.ranks if mask is not None else None
        found = self.saved_rows(index, shape, valid, device, mask)
        return found, found is not valid

    def saved_rows(
        self,
        index: int,
        shape: tuple[int, ...],
        mask: TokenMask | None,
        device: torch.device,
        source: AttentionMask | None = None,
    ) -> TokenMask | None:
        """Return the rows of a call that are saved; ``mask`` are those that are no padding, from ``source``."""
        rows = self.rows_of(index)
        if rows is None or not rows.pattern or is_capturing(device):
            return mask
        if len(shape) == 1 and source is not None and source.sequences:
            shape = (source.sequences, shape[0] // source.sequences)
        key, known = (rows.pattern, shape, device, mask), self._row_masks
        if key not in known:
            with _disable_current_modes():  # a selective checkpoint counts the operators, and must find them again
                known[key] = rows.mask(shape, mask, device)
        return known[key]

    def rows_of(self, index: int) -> GradientRows | None:
        """Return what a module has shown of its rows."""
        found = self.learned.get(index)
        return found if isinstance(found, GradientRows) else None

    def note_left_out(self, index: int, had_gradient: Tensor) -> None:
        """Check whether rows that a module has shown in its first steps to have no gradient had one."""
        self._pending.left_out.note(had_gradient, functools.partial(self._refuse_rows, self.names[index]))

    def _refuse_rows(self, name: str, _: int) -> NoReturn:
        for one in self.learned.values():
            if isinstance(one, GradientRows):
                one.pattern = 0  # saves all rows from now on
        raise RuntimeError(
            f"In its first steps, {name} had a gradient in the first or last rows of every sequence alone, so it saved "
            "no others; but now others have one. The gradients of this step are incomplete: drop them with zero_grad, "
            "and go on with the next step, which saves all rows. (On a GPU this is said one step later: go back to a "
            "checkpoint if the optimizer has used them.) Or convert with mask_padding=False."
        )

    def _inputs_of(self, index: int, shape: tuple[int, ...], masked: bool) -> CallInputs:
        running = self._running.inputs
        inputs, tokens = (running[-1] if running else CallInputs()).fitting(shape), math.prod(shape)
        if not in_backward():
            self._pending.add(index, tokens, inputs)
        elif (first := self._pending.find()) is not None and first.module is not self._running.outermost:
            inputs = first.find(index, tokens, self.names[index], masked)  # else the whole model is recomputed
        return inputs

    def known_call(self, shape: tuple[int, ...], device: torch.device, masked: bool) -> LayerCall:
        """Return the mask and ids that a call would have now, outside of a recomputation, without remembering them."""
        running = self._running.inputs
        inputs = running[-1] if running else CallInputs()
        return inputs.fitting(shape).layer_call(shape, device, masked)

    def expected(self, index: int, call: LayerCall) -> Tensor | None:
        """Return ŷ for a sketch that a layer makes for itself and for the layers that share it, float32, shape (N,)."""
        groups = [group for group in self.sketch_cache.groups if index in group]
        members = sorted(set(max(groups, key=len, default=(index,))))
        known = [self.estimators[member].predict(call) for member in members if member in self.estimators]
        squares = [norms.double().square() for norms in known if norms is not None]
        return torch.stack(squares).sum(0).sqrt().float() if squares else None

    def known_mask(self, shape: tuple[int, ...]) -> Tensor | None:
        """Return the valid tokens, (batch, sequence), of a call with such rows now, without remembering it; or None."""
        running = self._running.inputs
        mask = running[-1].fitting(shape).mask if running else None
        return None if mask is None else valid_tokens(mask.flat).view(mask.sequences, -1)

    @property
    def current_pass(self) -> Any:
        """Return what the node of a layer must hold for its recomputation; None outside of a forward pass."""
        return None if in_backward() else self._pending.current

    def note_backward(self) -> ForwardPass | None:
        """Note that a backward pass has begun, and return its forward pass, if that is known."""
        found = self._pending.find()
        self._pending.backward_seen = True
        return found

    def _finish_survey(self, survey: Survey, output: Any) -> None:
        """Make the modules exact that free nothing, and say so."""
        found, sites = survey.decide(output)
        self.kept_sites = self.kept_sites.union(sites)
        if found:
            self.kept_anyway = self.kept_anyway.union(found)  # another set: what is set aside has the old one
            self.checks.say_kept_anyway(found, is_chosen=self.config.target_modules != "all-linear")

    def _widen_codes(self, model: nn.Module) -> None:
        """Give the modules more bits whose codes have too much noise, and say so."""
        found = self.noise.decide(self.sketch_cache.groups, self._pending.backward_seen)
        if not found:
            return
        widened, modules = dict[int, tuple[int, float]](), [one for one in model.modules() if "rmm_index" in vars(one)]
        for module in modules:
            index: int = vars(module)["rmm_index"]
            is_one = index in found and vars(module)["rmm_context"] is self
            if is_one:
                widened[index] = found[index]
                module._take_bits(found[index][0])  # pyright: ignore
        self.noise.note_widened(widened)
        if widened:
            self.checks.say_widened(sorted(widened))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch.compiler.is_compiling():
            return args, self.traced_masks.enter(module, self._signature(module), args, kwargs)
        running = self._running
        if running.inputs and module is not running.outermost and not running.recomputing:
            running.inputs.append(running.inputs[-1].inside(module, args, kwargs))
            return None
        # No hook runs after a KeyboardInterrupt: drop what an interrupted call has left.
        is_interrupted = running.recomputing and not in_backward()
        is_again = module is running.outermost
        if running.inputs and (is_interrupted or (is_again and not is_called_inside_itself(module))):
            running.inputs.clear()
            self.sketch_cache.clear()
        if running.inputs:
            running.inputs.append(running.inputs[-1].inside(module, args, kwargs))
            return None
        index, kwargs = take_sample_index(module, kwargs)
        running.outermost = module
        running.recomputing = in_backward()
        if not running.recomputing:
            self._open_step(module, (args, kwargs))
        running.inputs.append(CallInputs(sample_index=index).inside(module, args, kwargs))
        return args, kwargs

    def _open_step(self, module: nn.Module, batch: Any) -> None:
        if self.seeds.step is not None:  # of a pass in training, for recomputations after one in eval mode
            self._last_seeds = self.seeds
        self.seeds = StepSeeds(self.ranks.open(module))
        if not self.checks.is_done:
            self._running.survey = Survey(batch)
        self.sketch_cache.clear()
        self._row_masks = {}  # another thread may have the last one
        self._pending.left_out.read()
        if self.noise.is_unseen:
            self._pending.backward_seen = False
        unread = [one for one in self.learned.values() if one.unread]
        is_full = any(not one.is_observing for one in unread)  # so that most modules are read at once
        is_full = is_full and not is_capturing(unread[0].unread[0].device)
        seen = [one for one in self.directions.values() if one.pending is not None]
        if not (is_full or seen or self.noise.is_full):
            self.waits = 0
        elif all(one.backward_begun for one in self._pending.passes()):
            self.waits = 0
            if self.noise.is_full:
                self._widen_codes(module)
            read_all(unread if is_full else [])
            for one in seen:
                one.settle()
        else:
            self.waits += 1
            if self.waits == MOST_WAITS:
                self.checks.say_waiting()
        turn = None if self._pending.left_out.is_suspected else self._turns.randrange(max(1, len(self.names)))
        self._pending.open(module, self.seeds, turn)

    def _signature(self, module: nn.Module) -> tuple[str, ...]:
        """Return the parameters of the module's forward, as read by :meth:`attach`; compilers can trace this."""
        for kind in type(module).__mro__:  # FSDP makes subclasses of a model's classes
            if kind in self._signatures:
                return self._signatures[kind]
        return ()

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced_masks.exit(module)
            return
        running = self._running
        if running.inputs:
            running.inputs.pop()
        if not running.inputs:
            running.outermost = None
            self.sketch_cache.clear()
            if not running.recomputing:
                is_step = output is not None and module.training and torch.is_grad_enabled() and not infers_shapes()
                self.checks.finish(module) if is_step else self.checks.forget()
                if is_step:
                    self.noise.note_pass()
                if running.survey is not None and is_step:
                    self._finish_survey(running.survey, output)
                running.survey = None
            if not running.recomputing:
                self._pending.close(output)
            if self.seeds.step is not None and not running.recomputing:
                draw_seed()
            if output is not None and not running.recomputing:
                self._pending.left_out.refuse()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a running forward pass."""
        fields = ("names", "config", "salt", "estimators", "learned", "directions", "sketch_cache")
        fields += ("_signatures", "_released", "kept_anyway", "kept_sites", "noise")
        handles = [one for one in self._handles if one.hooks_dict_ref() is not None]  # of a module that is there still
        return {"_handles": handles, **{name: value for name, value in vars(self).items() if name in fields}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no forward pass running."""
        vars(self).update({"exact_calls": {}, "_root": _nothing, **state})
        self._reset()

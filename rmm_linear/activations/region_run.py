"""One call of a module as a region, and its backward pass: see :mod:`rmm_linear.activations.region`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_unflatten

from rmm_linear._support.autocast import autocast_as, autocast_now, autocast_off
from rmm_linear._support.saved_graph import nodes_behind
from rmm_linear.activations.base import SavingCall
from rmm_linear.activations.own_forward import Passed, exact_inside, intercepted, original_forward
from rmm_linear.activations.region_arguments import (
    Arguments,
    HeldArguments,
    Stop,
    Which,
    is_cache,
    leaves_of,
    named,
    narrowed,
    parts_of,
    positional,
    shapes_of,
)
from rmm_linear.activations.region_slices import DRAWS, WHOLE, Cut, Part, Slices, Sums
from rmm_linear.context.surroundings import running_again
from rmm_linear.layers.function import SavingFunction, as_new
from rmm_linear.ops.regions import pack_source, unpack_source

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


class Different(BaseException):
    """Leaves a module's forward where it calls or feeds its sources otherwise than in the first call of its class."""


class Filled(BaseException):
    """Leaves a module's forward where it reads a cache that is not empty, as a second run would not find it again."""


@dataclass
class RegionForm:
    """What the first call of a class of modules has shown."""

    calls: int = 0  # calls of linear layers before the region
    sink: str | None = None  # name of the linear layer behind it; None where it ends with the module
    sinks: int = 0  # calls of the sink, each of which reads a value of the region
    reads: bool = False  # whether a source reads what another has made, so that gradients are on up to the last one
    # Whether a source reads what the module makes of arguments alone, or is called after the sink: gradients are on
    # too, and the outputs of sources are detached, so that scores save nothing
    derives: bool = False
    writes: bool = False  # whether the module writes into the output of a source
    is_plain: bool = False  # whether PyTorch's attention runs no fused kernel on CPU, as its mask needs a gradient
    # Arguments that nothing but sources read: the region runs without their values
    free: frozenset[int | str] = frozenset()
    slices: Slices | None = None  # how a replay can be divided; None in calls of one sequence
    reason: str | None = None  # why modules of this class stay exact; None if they do not


class Scores(TorchFunctionMode):
    """Keeps what is given to softmax, and the queries and keys that are given to a fused attention."""

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SOFTMAX:
            self.found.append((args[0] if args else kwargs["input"]).detach())
        elif func is F.scaled_dot_product_attention and len(args) > 1 and args[0].shape[:-2] == args[1].shape[:-2]:
            queries = args[0].detach()[..., :: max(1, args[0].shape[-2] // 64), :]  # some, as keys may be many
            self.found.append(queries @ args[1].detach().transpose(-1, -2) * args[0].shape[-1] ** -0.5)
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class RegionRun:
    """One call of a module as a region, and then all that its backward pass needs besides tensors."""

    module: Any
    linears: Sequence[str]  # names of its linear layers
    original: Callable[..., Any]
    form: RegionForm
    arguments: Arguments
    call: SavingCall
    seeds: list[int]
    bits: int
    is_coded: bool = True
    count: int = 0  # slices of the replay; 0 for as many as it needs
    why_whole: str | None = None  # why it is not divided, where it ought to be
    outs: list[Tensor] = field(default_factory=list)  # of the sources, until they are inputs of the function
    results: list[Tensor] = field(default_factory=list)  # of the function
    stored: list[Tensor] = field(default_factory=list)
    like: list[tuple[list[int], torch.dtype]] = field(default_factory=list)  # of the sources' outputs
    after: list[Tensor] = field(default_factory=list)  # random states, behind each source
    drawn: dict[int, Tensor] = field(default_factory=dict)  # those from which the module has drawn numbers
    sink_shapes: list[torch.Size] = field(default_factory=list)  # of its outputs
    scores: Scores | None = None
    errors: list[tuple[Tensor, Tensor]] | None = None  # scores, and those of decoded values; None if not compared

    def forward(self) -> Any:
        first = next(one for one in tree_leaves(self.arguments) if isinstance(one, Tensor) and one.is_floating_point())
        self.device, self.autocast = first.device, autocast_now([first.device.type])
        self.modes = [one.training for one in self.module.modules()]
        with alone:  # or another thread's replay has others in their place
            own = own_parameters(self.module, self.linears)
        self.own = {name: one for name, one in own.items() if one.requires_grad}
        self.given = {one.untyped_storage()._cdata for one in tree_leaves(self.arguments) if isinstance(one, Tensor)}
        before = random_state(self.device)
        torch.set_grad_enabled(self.form.reads or self.form.derives)
        try:
            kernels = sdpa_kernel(SDPBackend.MATH) if self.form.is_plain else nullcontext()
            # What a later source reads saves for its own backward pass, and nothing else does.
            inside = nullcontext() if self.form.reads else exact_inside(self.module, self.linears)
            with alone, inside, intercepted(self.module, self.linears, self._called), self._caching(), kernels:
                output = self.original(*positional(self.arguments), **named(self.arguments))
        except (Filled, Different):
            set_random_state(self.device, before)
            raise
        finally:
            torch.set_grad_enabled(True)
        output = self._joined_output(output)
        # The node holds this object, and its tensors as saved ones, which hooks may replace.
        self.outs, self.results, self.stored, self.after, self.drawn, self.arguments = [], [], [], [], {}, {}
        self.own = dict.fromkeys(self.own)
        return output

    def _called(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a linear layer: a source, the sink, or one behind the region."""
        form, place, sinks = self.form, len(self.like), len(self.sink_shapes)
        is_later = form.derives and place < form.calls  # a source after the sink
        if sinks and (sinks == form.sinks if name == form.sink else not is_later):
            return original(*args, **kwargs)
        self._note_draws(place - 1)
        torch.set_grad_enabled(True)
        if name == form.sink:
            output = original(self.joined(args[0], -sinks or None), *args[1:], **kwargs)
            self.sink_shapes.append(output.shape)
            return output
        is_given = form.reads or form.derives or args[0].untyped_storage()._cdata in self.given
        if not is_given or place == len(self.seeds):
            raise Different
        output = original(*args, **kwargs)
        self._add(output, place)
        has_gradients = (form.reads or form.derives) and (place + 1 < form.calls or sinks > 0)
        if not form.reads:
            return Passed(output, output.detach(), has_gradients)
        if not form.writes:
            return Passed(output, output, has_gradients)
        with torch.set_grad_enabled(has_gradients):
            return Passed(output, output.clone(), has_gradients)

    def _add(self, output: Tensor, place: int) -> None:
        """Store the output of a source at once, as the module may write into it."""
        self.outs.append(output)
        self.like.append((list(output.shape), output.dtype))
        self.after.append(random_state(self.device))
        value = output.detach()
        with torch.no_grad(), autocast_off(self.device.type):
            self.stored.append(
                pack_source(value, self.bits, self.seeds[place], True) if self.is_coded else value.clone()
            )

    def _note_draws(self, place: int) -> None:
        """Keep the random state behind a source if numbers were drawn since then."""
        with _disable_current_modes():  # a simulated step's random state does not change
            if place >= 0 and not torch.equal(self.after[place], random_state(self.device)):
                self.drawn[place] = self.after[place]

    def joined(self, value: Tensor, which: Which = None) -> Tensor:
        """Return a value of the region as the result of the autograd function."""
        if self.scores is not None and which is None:
            self._compare(self.scores)
        kept = [one for one in self._kept() if one.requires_grad]
        # A graph of the value's own, as of parameters that it reads, would be kept for nothing.
        found = RegionFunction.run(value.detach(), self, which, *self.outs, *kept, *self.own.values())
        self.results.append(found)
        return found

    @contextmanager
    def _caching(self) -> Iterator[None]:
        """Give caches keys and values that have a gradient: another call may read them."""
        caches = [one for one in leaves_of(self.arguments)[0] if is_cache(one)]
        parts = [one for cache in caches for one in parts_of(cache) if "update" not in vars(one)]
        count = 0

        def update(part: Any, real: Callable[..., Any], key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if int(part.get_seq_length(*args[:1]) if args else part.get_seq_length(**_layer(kwargs))):
                raise Filled
            self._note_draws(len(self.like) - 1)
            with torch.enable_grad():
                key, value = (self.joined(one, (count, i)) for i, one in enumerate((key, value)))
                count += 1
                found = real(key, value, *args, **kwargs)
            return tuple(one.detach() for one in found)

        try:
            for part in parts:
                vars(part)["update"] = functools.partial(update, part, part.update)
            yield
        finally:
            for part in parts:
                vars(part).pop("update", None)

    def _cut(self) -> Cut:
        """Divide the replay where it would save much."""
        slices, shapes = self.form.slices, [shape for shape, _ in self.like]
        count = 1
        if slices is not None:
            itemsize = max(dtype.itemsize for _, dtype in self.like)
            count = self.count or slices.count(shapes, itemsize, self.device)
        if slices is None or count < 2:
            return WHOLE
        cut = None if slices.reason else slices.cut(count, shapes, shapes_of(self.arguments))
        other = "its arguments are not those of its first call" if cut is None else None
        self.why_whole = slices.reason or (DRAWS if self.drawn else other)
        return WHOLE if self.why_whole or cut is None else cut

    def _compare(self, scores: Scores) -> None:
        """Note the scores of this call, and those of the decoded values."""
        exact, scores.found, self.scores = scores.found, [], None
        with (
            torch.no_grad(),
            _disable_current_modes(),
            random_kept(self.device),
            autocast_as(self.autocast, cached=False),
        ):
            cut = self._cut()
            part = cut.parts()[0]  # some sequences show it too
            outs = [part.of(self._decoded(i, one), cut.source(i)) for i, one in enumerate(self.stored)]
            arguments = {key: None if is_cache(one) else one for key, one in self.arguments.items()}
            self.again(outs, narrowed(arguments, part, cut), self.drawn, part=part)
            exact = [part.of(one, one.shape[0] // part.total if part.total else 0) for one in exact]
        self.errors = list(zip(exact, scores.found, strict=True)) if len(exact) == len(scores.found) else []
        scores.found = []

    def again(
        self,
        outs: Sequence[Tensor],
        arguments: Arguments,
        states: dict[int, Tensor] | None = None,
        which: Which = None,
        part: Part = Part(),  # noqa: B008 - it is frozen
    ) -> Tensor:
        """Run the module again in the modes that it had, see :func:`replay`."""
        modules = list(self.module.modules())
        now = [one.training for one in modules]
        try:
            for one, mode in zip(modules, self.modes, strict=True):
                one.training = mode
            shapes = [part.shape(one) for one in self.sink_shapes]
            with running_again(), exact_inside(self.module):
                return replay(self.module, self.linears, self.form, outs, arguments, states, shapes, which)
        finally:
            for one, mode in zip(modules, now, strict=True):
                one.training = mode

    def _decoded(self, place: int, stored: Tensor) -> Tensor:
        shape, dtype = self.like[place]
        with autocast_off(stored.device.type):
            return unpack_source(stored, shape, self.bits, dtype, True) if self.is_coded else stored.detach()

    def _joined_output(self, output: Any) -> Any:
        """Do so with those leaves of the module's output that the region has made."""
        leaves, spec = leaves_of(output)
        first = None
        if not self.sink_shapes:  # the region ends with the module
            self._note_draws(len(self.like) - 1)
            first = next(i for i, one in enumerate(leaves) if isinstance(one, Tensor))
            leaves[first] = self.joined(leaves[first])
        for place, one in enumerate(leaves):
            is_made = isinstance(one, Tensor) and one.is_floating_point()
            is_made = is_made and not (one.requires_grad and (not self.form.derives or reaches(one, self.results)))
            if place != first and is_made and one.untyped_storage()._cdata not in self.given:
                leaves[place] = self.joined(one, place)
        return tree_unflatten(leaves, spec)

    def _kept(self) -> list[Tensor]:
        """The tensors among the arguments whose values the region reads."""
        kept = [value for key, value in self.arguments.items() if key not in self.form.free]
        return [one for one in leaves_of(kept)[0] if isinstance(one, Tensor)]


def own_parameters(module: Any, linears: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters of a module that are in none of its linear layers, by name."""
    inside = {id(one) for name in linears for one in module.get_submodule(name).parameters()}
    return {name: one for name, one in module.named_parameters() if id(one) not in inside}


def _layer(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name == "layer_idx"}


def reaches(value: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Say whether a tensor is made of some outputs of linear layers."""
    wanted = {one.grad_fn for one in outputs}
    return any(node in wanted for node in nodes_behind([value.grad_fn]))


# Held by a region that runs: a replay swaps a module's own parameters, and both read and set random states.
alone = threading.RLock()


class RegionFunction(SavingFunction):
    """A value of a region, whose gradients the module's own code computes from decoded values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: RegionRun, which: Which, *inputs: Tensor) -> Tensor:
        """Return the value. inputs: Outputs of the sources, arguments that need a gradient, and parameters."""
        ctx.run, ctx.which, ctx.call, ctx.calls, form = run, which, run.call, len(run.stored), run.form
        ctx.drawn = list(run.drawn)
        ctx.cut = run._cut()
        ctx.held = HeldArguments(run.arguments, form.free, which, ctx.cut)
        tensors = ctx.held.release()
        ctx.tensors = len(tensors)
        states = [run.drawn[place] for place in ctx.drawn]
        ctx.save_for_backward(*run.stored, *tensors, *states, *run.own.values())
        ctx.set_materialize_grads(False)
        return as_new(value)  # an input, which the function would return as a view of itself

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the region again, and compute its gradients."""
        (y,), run = grad_outputs, ctx.run
        needed = len(ctx.needs_input_grad) - 3
        if y is None:
            return (None,) * (3 + needed)
        SavingFunction.received(ctx, y, "a region of attention")
        calls, saved = ctx.calls, ctx.saved_tensors
        tensors = saved[calls : calls + ctx.tensors]
        states = dict(zip(ctx.drawn, saved[calls + ctx.tensors :], strict=False))
        # As they were: the module's own may be swapped or frozen by now, and may have hooks.
        own = [one.detach().requires_grad_() for one in saved[len(saved) - len(run.own) :]]
        decoded = [run._decoded(i, stored) for i, stored in enumerate(saved[:calls])]
        cut = ctx.cut if ctx.cut.total and y.dim() and y.shape[0] % ctx.cut.total == 0 else WHOLE
        ratio, of_sources = y.shape[0] // cut.total if cut.total else 0, [cut.source(i) for i in range(calls)]
        swapped, sums = _reparametrize_module(run.module, dict(zip(run.own, own, strict=True))), Sums(cut)
        with alone, torch.enable_grad(), autocast_as(run.autocast, cached=False), random_kept(y.device), swapped:
            for part in cut.parts():
                pairs = zip(decoded, of_sources, strict=True)
                outs = [part.of(one, source).detach().requires_grad_() for one, source in pairs]
                arguments, reached, ratios = ctx.held.given(tensors, part)
                value = run.again(outs, arguments, states, ctx.which, part)
                if not value.requires_grad:  # an output that depends on nothing that has a gradient
                    return (None,) * (3 + needed)
                found = torch.autograd.grad(value, [*outs, *reached, *own], part.of(y, ratio), allow_unused=True)
                sums.add(part, found, [*of_sources, *ratios, *(0,) * len(own)])
                del value, found, outs, arguments, reached  # before the next slice is made
        return None, None, None, *sums.gradients()


def replay(
    module: Any,
    linears: Sequence[str],
    form: RegionForm,
    outs: Sequence[Tensor],
    arguments: Arguments,
    states: dict[int, Tensor] | None = None,
    sink_shapes: Sequence[torch.Size] = (),
    which: Which = None,
) -> Tensor:
    """Run a module's own code with given outputs of its sources; return what the sink gets, or a leaf of the output.

    states: Random states behind some sources. which: None is what the sink gets, or the first leaf of the output.
    """
    place = sinks = 0

    def called(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal place, sinks
        if name != form.sink and place < len(outs):
            place += 1
            if states and place - 1 in states:
                set_random_state(outs[0].device, states[place - 1])
            return outs[place - 1].clone() if form.writes else outs[place - 1]
        sinks += name == form.sink
        if which is None or (isinstance(which, int) and which < 0 and sinks == 1 - which):
            raise Stop(args[0])
        return args[0].new_zeros(()).expand(sink_shapes[sinks - 1] if sinks <= len(sink_shapes) else args[0].shape)

    original = original_forward(module)
    try:
        with intercepted(module, linears, called):
            output = original(*positional(arguments), **named(arguments))
    except Stop as stop:
        return stop.value
    leaves = leaves_of(output)[0]
    if isinstance(which, int):
        return leaves[which]
    return next(one for one in leaves if isinstance(one, Tensor))


@contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state afterwards."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(device, before)


def random_state(device: torch.device) -> Tensor:
    """The state that a device draws from, without a wait."""
    with _disable_current_modes():
        return torch.get_rng_state() if device.type != "cuda" else torch.cuda.get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    with _disable_current_modes():
        torch.set_rng_state(state) if device.type != "cuda" else torch.cuda.set_rng_state(state, device)

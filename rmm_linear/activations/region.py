"""Attention with code of its own: a region between a module's linear layers that runs again in the backward pass.

A module calls linear layers (the *sources*), then computes anything that has a softmax, then calls another linear
layer (the *sink*) or returns. The region is everything between. Its forward pass is the module's own code with
gradients off, so its output is the module's to the bit, whichever kernel it calls, with dropout too. It saves the
outputs of the sources in few bits, less the mean of each sequence, with the mean (:mod:`rmm_linear.ops.regions`). In the
backward pass the module's own code runs again on the decoded values, with the random numbers it had, stops at the sink,
and autograd computes the gradients with respect to the sources' outputs, to parameters that are read between, and to
arguments that reach the region by another way. Nothing else is saved: no scores, probabilities or masks of dropout.

The gradient of a source's weight follows from that of its output, so its noise is that of the codes, and as for
:mod:`rmm_linear.packing.attention`, softmax of decoded values is biased by less than that: codes have 8 bits where the
scores spread far. Time: one more forward pass of the region.

What a region is, is seen in the first call of a class in training (:func:`look`), which runs the module exactly, and
then as a region that saves uncoded values: its output and its gradients must be those of autograd. Where they are not,
the module stays exact and says so.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from rmm_linear._support.autocast import autocast_as, autocast_now, autocast_off
from rmm_linear.activations.attention import AttendingModule
from rmm_linear.activations.base import SavingCall
from rmm_linear.config import RMMConfig
from rmm_linear.context.learned import ScoreSpread
from rmm_linear.context.surroundings import in_backward
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.layers.function import SavingFunction, as_no_view
from rmm_linear.ops.regions import pack_source, unpack_source
from rmm_linear.sketches.seeds import draw_seed, is_capturing, seeds_of

_WIDE = 8  # bits where scores spread far
_NAMES = re.compile("softmax|scaled_dot_product|ALL_ATTENTION_FUNCTIONS|flash_attn|flex_attention")
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_LARGEST_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4}  # of a gradient in the check, relative; 1e-2 in half types
Arguments = dict[int | str, Any]  # by position or name


class _Stop(BaseException):
    """Leaves a module's forward at the sink; code that catches exceptions does not catch it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


@dataclass
class RegionForm:
    """What the first call of a class of modules has shown.

    Attributes:
        calls: Calls of linear layers before the region.
        sink: Name of the linear layer behind it; None where it ends with the module.
        reads: Whether a source reads what others have made.
        writes: Whether the module writes into the output of a source.
        free: Arguments that nothing but sources read: the region runs without their values.
        outputs: Places of further outputs that need a gradient, among the leaves of the module's output.
        reason: Why modules of this class stay exact; None if they do not.
    """

    calls: int = 0
    sink: str | None = None
    reads: bool = False
    writes: bool = False
    free: frozenset[int | str] = frozenset()
    outputs: tuple[int, ...] = ()
    reason: str | None = None


class PackedRegion(AttendingModule):
    """A module whose attention is a region. The output is the module's own to the bit.

    Attributes:
        rmm_linears: Names of the children that are linear layers.
    """

    rmm_linears: tuple[str, ...]

    def _set_up(self, config: RMMConfig | None, *arguments: Any, linears: Sequence[str] = (), **named: Any) -> None:
        super()._set_up(config, *arguments, **named)
        self.rmm_linears = tuple(linears)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, in training as a region; exactly in compiled code."""
        original = super().forward
        if not self.training or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        vars(self)["rmm_attended"] = True  # nn.Module's own assignment takes 3 µs
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        first = next((one for one in tensors if one.is_floating_point()), None)
        if first is None:
            return original(*args, **kwargs)
        call = self._packed_call(tuple(first.shape[:-1]), first.device)
        is_saving = torch.is_grad_enabled() and any(
            one.requires_grad for tensors in (tensors, self.parameters()) for one in tensors
        )
        if call.is_exact or not is_saving or not first.numel():
            return original(*args, **kwargs)
        arguments: Arguments = {**dict(enumerate(args)), **kwargs}
        reason = _why_exact(self, arguments, first.device)
        form = None if reason else self._form(original, arguments)
        self._note_exact(reason or (form.reason if form else None))
        if form is None or form.reason:
            return original(*args, **kwargs)
        seed = draw_seed() if call.seed is None else call.seed
        spread = self._spread
        bits = _WIDE if spread is not None and spread.is_large else self._bits
        run = _Run(self, original, form, arguments, call, seeds_of(seed, form.calls), bits)
        if spread is None or not spread.is_observing or in_backward() or isinstance(first, FakeTensor):
            return run.forward()
        with _Scores() as run.scores:
            output = run.forward()
        spread.observe_errors(run.errors)
        return output

    def _form(self, original: Callable[..., Any], arguments: Arguments) -> RegionForm:
        """Return what is known of the module's class; a simulated step, which has no values, checks nothing."""
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(arguments))
        known: dict[Any, RegionForm] = vars(self) if self.rmm_context is None else self.rmm_context.regions  # pyright: ignore
        key = "rmm_form" if self.rmm_context is None else (type(self), self.rmm_linears)
        form = known.get(key)
        if form is None:
            with nullcontext() if is_fake else _disable_current_modes():
                form = look(self, original, arguments, is_checked=not is_fake)
            if not is_fake:
                known[key] = form
        return form

    @property
    def _spread(self) -> ScoreSpread | None:
        spread = None if self.rmm_context is None else self.rmm_context.learned.get(self.rmm_index)
        return spread if isinstance(spread, ScoreSpread) else None


class _Scores(TorchFunctionMode):
    """Keeps what is given to softmax, and the queries and keys that are given to a fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SOFTMAX:
            self.found.append((args[0] if args else kwargs["input"]).detach())
        elif func is F.scaled_dot_product_attention and len(args) > 1 and args[0].shape[:-2] == args[1].shape[:-2]:
            self.found.append(args[0].detach() @ args[1].detach().transpose(-1, -2) * args[0].shape[-1] ** -0.5)
        return func(*args, **(kwargs or {}))


def reads_softmax(module: nn.Module) -> bool:
    """Say whether a module's own code, or functions and methods that it names, name a softmax or an attention."""
    forward = inspect.unwrap(type(module).forward)
    found, seen = [forward], set[Any]()
    for _ in range(3):
        codes = [one.__code__ for one in found if hasattr(one, "__code__") and one.__code__ not in seen]
        names = {name for code in codes for name in (*code.co_names, *code.co_varnames)}
        if any(_NAMES.search(name) for name in names):
            return True
        seen |= set(codes)
        spaces = [getattr(one, "__globals__", {}) for one in found]
        found = [space[name] for space in spaces for name in names if inspect.isfunction(space.get(name))]
        found += [one for name in names if inspect.isfunction(one := getattr(type(module), name, None))]
    return False


def _why_exact(module: Any, arguments: Arguments, device: torch.device) -> str | None:
    """Say why a call stays exact."""
    for value in arguments.values():
        if _is_cache(value):
            try:
                if int(value.get_seq_length(getattr(module, "layer_idx", None) or 0)):
                    return "its KV cache is not empty"
            except (TypeError, ValueError, AttributeError):
                return "its KV cache does not say how long it is"
    if is_capturing(device):
        return "a CUDA graph is captured, in which the state that dropout is drawn from cannot be read"
    return None


def _is_cache(value: object) -> bool:
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    return tree_flatten(tree, is_leaf=_is_cache)


@dataclass(eq=False)
class _Run:
    """One call of a module as a region, and then all that its backward pass needs besides tensors."""

    module: Any
    original: Callable[..., Any]
    form: RegionForm
    arguments: Arguments
    call: SavingCall
    seeds: list[int]
    bits: int
    is_coded: bool = True
    outs: list[Tensor] = field(default_factory=list)  # of the sources, until they are inputs of the function
    stored: list[Tensor] = field(default_factory=list)
    like: list[tuple[list[int], torch.dtype]] = field(default_factory=list)  # of the sources' outputs
    after: list[Tensor | None] = field(default_factory=list)  # random states, behind each source
    drawn: dict[int, Tensor] = field(default_factory=dict)  # those from which the module has drawn numbers
    sink_shape: torch.Size | None = None
    is_done: bool = False
    scores: _Scores | None = None
    errors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # scores, and those of decoded values

    def forward(self) -> Any:
        """Run the module."""
        first = next(one for one in tree_leaves(self.arguments) if isinstance(one, Tensor) and one.is_floating_point())
        self.device, self.autocast = first.device, autocast_now([first.device.type])
        try:
            with intercepted(self.module, self._called):
                output = self.original(*positional(self.arguments), **named(self.arguments))
        finally:
            torch.set_grad_enabled(True)
        if self.form.sink is None or self.form.outputs:
            output = self._joined(output)
        for name in ("outs", "after", "arguments", "original"):
            setattr(self, name, None)
        return output

    def _called(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a linear layer: a source, the sink, or one behind the region."""
        place = len(self.like)
        if place < self.form.calls:
            self._note_draws(place - 1)
            output = original(*args, **kwargs)
            self._add(output, place)
            if place + 1 == self.form.calls:
                torch.set_grad_enabled(False)
            return output if self.form.reads else output.detach()
        if name != self.form.sink or self.is_done:
            return original(*args, **kwargs)
        self.is_done = True
        self._note_draws(place - 1)
        torch.set_grad_enabled(True)
        output = original(self._joined_value(args[0]), *args[1:], **kwargs)
        self.sink_shape = output.shape
        return output

    def _add(self, output: Tensor, place: int) -> None:
        """Store the output of a source at once, as the module may write into it."""
        self.outs.append(output.view_as(output) if self.form.writes and self.form.reads else output)
        self.like.append((list(output.shape), output.dtype))
        self.after.append(_random_state(self.device))
        value = output.detach()
        with torch.no_grad(), autocast_off(self.device.type):
            self.stored.append(pack_source(value, self.bits, self.seeds[place]) if self.is_coded else value.clone())

    def _note_draws(self, place: int) -> None:
        """Keep the random state behind a source if numbers were drawn since then."""
        state = self.after[place] if place >= 0 else None
        if state is not None and not torch.equal(state, _random_state(self.device)):
            self.drawn[place] = state

    def _joined_value(self, value: Tensor, which: int | None = None) -> Tensor:
        """Return a value of the region as the result of the autograd function."""
        if self.scores is not None and which is None:
            self._compare(self.scores)
        kept = [one for one in self._kept() if one.requires_grad]
        found = RegionFunction.run(value, self, which, len(self.outs), *self.outs, *kept, *self.parameters())
        return found

    def _compare(self, scores: _Scores) -> None:
        """Note the scores of this call, and those of the decoded values."""
        exact, scores.found, self.scores = scores.found, [], None
        with torch.no_grad(), _disable_current_modes(), random_kept(self.device), autocast_as(self.autocast):
            outs = [self._decoded(i, one) for i, one in enumerate(self.stored)]
            arguments = {key: None if _is_cache(one) else one for key, one in self.arguments.items()}
            replay(self.module, self.form, outs, arguments, self.drawn, self.sink_shape)
        if len(exact) == len(scores.found):
            self.errors = list(zip(exact, scores.found, strict=True))
        scores.found = []

    def _decoded(self, place: int, stored: Tensor) -> Tensor:
        shape, dtype = self.like[place]
        with autocast_off(stored.device.type):
            return unpack_source(stored, shape, self.bits, dtype) if self.is_coded else stored.detach()

    def _joined(self, output: Any) -> Any:
        """Do so with those leaves of the module's output that the region has made."""
        leaves, spec = _leaves(output)
        places = self.form.outputs
        if self.form.sink is None:
            self._note_draws(len(self.like) - 1)
            first = next(i for i, one in enumerate(leaves) if isinstance(one, Tensor))
            leaves[first] = self._joined_value(leaves[first])
            places = tuple(place for place in places if place != first)
        for place in places:
            one = leaves[place] if place < len(leaves) else None
            if isinstance(one, Tensor) and one.is_floating_point() and not one.requires_grad:
                leaves[place] = self._joined_value(one, place)
        return tree_unflatten(leaves, spec)

    def _kept(self) -> list[Tensor]:
        """The tensors among the arguments whose values the region reads."""
        kept = [value for key, value in self.arguments.items() if key not in self.form.free]
        return [one for one in _leaves(kept)[0] if isinstance(one, Tensor)]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are read in the region and need a gradient."""
        return [one for one in _between(self.module) if one.requires_grad]


def _between(module: Any) -> list[nn.Parameter]:
    """The parameters of a module that are in none of its linear layers."""
    linears = {id(one) for name in module.rmm_linears for one in module.get_submodule(name).parameters()}
    return [one for one in module.parameters() if id(one) not in linears]


def positional(arguments: Arguments) -> list[Any]:
    """Return the arguments that are given by position."""
    return [value for key, value in arguments.items() if isinstance(key, int)]


def named(arguments: Arguments) -> dict[str, Any]:
    """Return those that are given by name."""
    return {key: value for key, value in arguments.items() if isinstance(key, str)}


@contextmanager
def intercepted(module: Any, called: Callable[..., Any]) -> Iterator[None]:
    """Let a function run a module's linear layers: it gets a name, the layer's forward, and its arguments."""
    children = {name: module.get_submodule(name) for name in module.rmm_linears}
    before = {name: vars(child).get("forward") for name, child in children.items()}
    try:
        for name, child in children.items():
            vars(child)["forward"] = functools.partial(called, name, child.forward)
        yield
    finally:
        for name, child in children.items():
            if before[name] is None:
                vars(child).pop("forward", None)
            else:
                vars(child)["forward"] = before[name]


class RegionFunction(SavingFunction):
    """A value of a region, whose gradients the module's own code computes from decoded values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, run: _Run, which: int | None, calls: int, *inputs: Tensor) -> Tensor:
        """Return the value. inputs: Outputs of the sources, arguments that need a gradient, and parameters."""
        ctx.run, ctx.which, ctx.call, form = run, which, run.call, run.form
        ctx.drawn = list(run.drawn)
        ctx.values = {}  # of the arguments, without tensors
        tensors: list[Tensor] = []
        for key, argument in run.arguments.items():
            leaves, spec = _leaves(argument)
            held: list[Any] = []
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    held.append(None if _is_cache(leaf) else leaf)
                elif key in form.free:
                    held.append(_Absent(leaf.shape, leaf.dtype, leaf.device))
                else:
                    held.append(_Held(len(tensors), leaf.requires_grad))
                    tensors.append(leaf)
            ctx.values[key] = held, spec
        ctx.tensors = len(tensors)
        states = [run.drawn[place] for place in ctx.drawn]
        ctx.save_for_backward(*run.stored, *tensors, *states, *run.parameters())
        ctx.set_materialize_grads(False)
        return as_no_view(value)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the region again, and compute its gradients."""
        (y,), run = grad_outputs, ctx.run
        needed = len(ctx.needs_input_grad) - 4
        if y is None:
            return (None,) * (4 + needed)
        SavingFunction.received(ctx, y, "a region of attention")
        calls, saved = run.form.calls, ctx.saved_tensors
        tensors = saved[calls : calls + ctx.tensors]
        states = dict(zip(ctx.drawn, saved[calls + ctx.tensors :], strict=False))
        outs = [run._decoded(i, stored) for i, stored in enumerate(saved[:calls])]
        wanted = [one.requires_grad_() for one in outs]
        arguments, reached = {}, []
        for key, (held, spec) in ctx.values.items():
            leaves = [one.tensor(tensors, reached) if isinstance(one, _Placed) else one for one in held]
            arguments[key] = tree_unflatten(leaves, spec)
        wanted += [*reached, *run.parameters()]
        with torch.enable_grad(), autocast_as(run.autocast, cached=False), random_kept(y.device):
            value = replay(run.module, run.form, outs, arguments, states, run.sink_shape, ctx.which)
            found = torch.autograd.grad(value, wanted, y, allow_unused=True)
        return None, None, None, None, *found


class _Placed:
    """Stands for a tensor among arguments."""

    def tensor(self, tensors: Sequence[Tensor], reached: list[Tensor]) -> Tensor:
        """Return it for the replay, and add it to those that need a gradient."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Held(_Placed):
    place: int
    needs_gradient: bool

    def tensor(self, tensors: Sequence[Tensor], reached: list[Tensor]) -> Tensor:
        found = tensors[self.place].detach()
        if self.needs_gradient:
            reached.append(found.requires_grad_())
        return found


@dataclass(frozen=True)
class _Absent(_Placed):
    """A tensor that only sources read: NaN, so that a use of it is seen."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def tensor(self, tensors: Sequence[Tensor], reached: list[Tensor]) -> Tensor:
        return torch.full((), torch.nan, dtype=self.dtype, device=self.device).expand(self.shape)


def replay(
    module: Any,
    form: RegionForm,
    outs: Sequence[Tensor],
    arguments: Arguments,
    states: dict[int, Tensor] | None = None,
    sink_shape: torch.Size | None = None,
    which: int | None = None,
) -> Tensor:
    """Run a module's own code with given outputs of its sources; return what the sink gets, or a leaf of the output.

    states: Random states behind some sources. which: The leaf; None is what the sink gets, or the first one.
    """
    place = 0

    def called(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal place
        if place < form.calls:
            place += 1
            if states and place - 1 in states:
                _set_random_state(outs[0].device, states[place - 1])
            return outs[place - 1].clone() if form.writes else outs[place - 1]
        if name == form.sink and which is None:
            raise _Stop(args[0])
        return args[0].new_zeros(()).expand(args[0].shape if sink_shape is None else sink_shape)

    original = original_forward(module)
    try:
        with intercepted(module, called):
            output = original(*positional(arguments), **named(arguments))
    except _Stop as stop:
        return stop.value
    leaves = _leaves(output)[0]
    return next(one for one in leaves if isinstance(one, Tensor)) if which is None else leaves[which]


def original_forward(module: Any) -> Callable[..., Any]:
    """Return the forward that a module had before it was converted, or has."""
    kind = next(one for one in type(module).__mro__ if not one.__module__.startswith("rmm_linear."))
    return kind.forward.__get__(module)


@contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """Restore the random state afterwards."""
    before = _random_state(device)
    try:
        yield
    finally:
        _set_random_state(device, before)


def _random_state(device: torch.device) -> Tensor:
    """The state that a device draws from, without a wait."""
    with _disable_current_modes():
        return torch.get_rng_state() if device.type != "cuda" else torch.cuda.get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    with _disable_current_modes():
        torch.set_rng_state(state) if device.type != "cuda" else torch.cuda.set_rng_state(state, device)


@contextmanager
def _exact_inside(module: nn.Module) -> Iterator[None]:
    """Run converted modules inside of a module exactly: they learn nothing, and take no seeds."""
    with ExitStack() as stack:
        for child in module.modules():
            if child is not module and isinstance(child, ConvertedModule):
                vars(child)["forward"] = original_forward(child)
                stack.callback(vars(child).pop, "forward", None)
        yield


class _Softmaxes(TorchFunctionMode):
    """Notes how many linear layers were called before the last softmax."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls, self.last = calls, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SOFTMAX or func is F.scaled_dot_product_attention:
            self.last = len(self.calls)
        return func(*args, **(kwargs or {}))


def look(module: Any, original: Callable[..., Any], arguments: Arguments, *, is_checked: bool = True) -> RegionForm:
    """Find the region of a module, and check that it has the output and the gradients of autograd.

    It runs the module twice exactly and twice as a region, without a trace in its parameters or the random numbers.
    """
    device = next(one for one in tree_leaves(arguments) if isinstance(one, Tensor)).device
    identity = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with identity, random_kept(device), _exact_inside(module), torch.enable_grad():
        state = _random_state(device)
        try:
            return _look(module, original, arguments, device, state, is_checked)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return RegionForm(reason=f"run again, its code fails ({str(error).partition(chr(10))[0]})")


def _look(
    module: Any, original: Callable[..., Any], arguments: Arguments, device: torch.device, state: Tensor, checked: bool
) -> RegionForm:
    given = _detached(arguments)
    calls: list[tuple[str, Tensor, Tensor, int]] = []

    def called(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        calls.append((name, args[0], output, output._version))
        return output

    with intercepted(module, called), _Softmaxes(calls) as seen:
        output = original(*positional(given), **named(given))
    form = _found(given, calls, seen.last)
    if form.reason:
        return form
    leaves = [one for one in _leaves(output)[0]]
    value = calls[form.calls][1] if form.sink else next(one for one in leaves if isinstance(one, Tensor))
    form.writes = any(one._version != version for _, _, one, version in calls[: form.calls])
    first = next((i for i, one in enumerate(leaves) if isinstance(one, Tensor)), None)
    form.outputs = tuple(
        i for i, one in enumerate(leaves) if i != first and isinstance(one, Tensor) and one.requires_grad
    )
    inputs = [one for one in tree_leaves(given) if isinstance(one, Tensor) and one.requires_grad]
    wanted = [*inputs, *(one for one in _between(module) if one.requires_grad)]
    y = torch.ones_like(value) if not checked else _directions(value)
    expected = torch.autograd.grad(value, wanted, y, allow_unused=True)
    outs = [one.detach().requires_grad_() for _, _, one, _ in calls[: form.calls]]
    if form.writes:  # they have changed since
        outs = [torch.zeros_like(one, requires_grad=True) for one in outs]
    del calls, output
    # The same arguments, as leaves that reach the region past the sources.
    again = _detached(arguments)
    _set_random_state(device, state)
    reached = [(key, one) for key, one in again.items() if isinstance(one, Tensor) and one.requires_grad]
    there = torch.autograd.grad(
        replay(module, form, outs, again), [*outs, *(one for _, one in reached)], y, allow_unused=True
    )
    form.free = frozenset(key for (key, _), one in zip(reached, there[len(outs) :], strict=True) if one is None)
    if not checked:
        return form
    _set_random_state(device, state)
    last = _detached(arguments)
    run = _Run(module, original, form, last, SavingCall(), [0] * form.calls, _WIDE, is_coded=False)
    inputs = [one for one in tree_leaves(last) if isinstance(one, Tensor) and one.requires_grad]
    wanted = [*inputs, *(one for one in _between(module) if one.requires_grad)]
    found_value = _value_of(run)
    found = torch.autograd.grad(found_value, wanted, y, allow_unused=True)
    form.reason = _difference(value, found_value, expected, found)
    return form


def _value_of(run: _Run) -> Tensor:
    """Run a region up to its sink."""
    join = run._joined_value

    def stop(value: Tensor, which: int | None = None) -> Tensor:
        raise _Stop(join(value, which))

    run._joined_value = stop  # type: ignore[method-assign]
    try:
        run.forward()
    except _Stop as stopped:
        return stopped.value
    raise RuntimeError("its sink was not called")


def _detached(arguments: Arguments) -> Arguments:
    """Return arguments that share memory with given ones; floating tensors need a gradient, and caches are left out."""
    leaves, spec = _leaves(arguments)
    made = [None if _is_cache(one) else one for one in leaves]
    for i, one in enumerate(made):
        if isinstance(one, Tensor):
            made[i] = one.detach().requires_grad_() if one.is_floating_point() else one.detach()
    return tree_unflatten(made, spec)


def _directions(value: Tensor) -> Tensor:
    numbers = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return numbers.to(value.device, value.dtype)


def _found(arguments: Arguments, calls: Sequence[tuple[str, Tensor, Tensor, int]], last: int) -> RegionForm:
    """Find sources and sink. last: Calls of linear layers before the last softmax; 0 if none was seen."""
    storages = {one.untyped_storage()._cdata for one in tree_leaves(arguments) if isinstance(one, Tensor)}
    is_argument = [x.untyped_storage()._cdata in storages for _, x, _, _ in calls]
    if not last:  # in a kernel that is no function of PyTorch: the last layer is the sink, unless it reads an argument
        last = len(calls) - (0 if is_argument[-1:] == [True] else 1)
    if last < 1:
        return RegionForm(reason="no linear layer was called before its softmax")
    sink = calls[last][0] if last < len(calls) else None
    if sink is not None and [name for name, *_ in calls].count(sink) > 1:
        return RegionForm(reason=f"its {sink} is called more than once")
    return RegionForm(last, sink, reads=not all(is_argument[:last]))


def _difference(
    value: Tensor, found: Tensor, expected: Sequence[Tensor | None], got: Sequence[Tensor | None]
) -> str | None:
    """Say how a region differs from autograd; None if it does not."""
    limit = _LARGEST_ERROR.get(value.dtype, 1e-2)
    if not _is_near(value.detach(), found.detach(), limit):
        return "run again, its code has another output"
    for one, other in zip(expected, got, strict=True):
        if (one is None) != (other is None) and bool((one if other is None else other).any()):  # type: ignore[union-attr]
            return "run again, its code gives no gradient where autograd gives one"
        if one is not None and other is not None and not _is_near(one, other, limit):
            return "run again, its code has another gradient"
    return None


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    one, other = one.double(), other.double()
    return bool((one - other).norm() <= limit * one.norm())

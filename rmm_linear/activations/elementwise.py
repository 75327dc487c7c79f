"""Elementwise code that is known by no name: its derivatives by a vector of ones, in a few bits per element.

Every element of the output is a function g of one element of each input, so dX = dY ∘ ∂g/∂X, and the gradient of the
sum of the outputs is ∂g/∂X itself, which autograd computes from the module's own code. It is stored in few bits and
enters dX linearly: the gradient is unbiased, whatever g is.

Inputs are that of a module without linear layers, or the outputs of a module's linear layers: then g is the code
between these *sources* and the linear layer behind it, the *sink*, or the module's end. A source may have two inputs
side by side or in turn. Parameters of one element get the sum of dY ∘ ∂g/∂α, where ∂g/∂α is stored likewise.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from rmm_linear._support.autocast import autocast_off
from rmm_linear._support.layouts import is_dense
from rmm_linear._support.saved_graph import graph_leaves
from rmm_linear.activations.base import PackedModule, SavingCall, changes_setting
from rmm_linear.activations.gated import gated_bits
from rmm_linear.activations.gated_parts import width_of
from rmm_linear.activations.own_forward import HOOKS, Passed, has_hooks_of_others, intercepted
from rmm_linear.activations.region_run import Different
from rmm_linear.config import RMMConfig
from rmm_linear.layers.converted import original_of
from rmm_linear.layers.function import SavingFunction, as_new
from rmm_linear.ops.regions import pack_source, unpack_source
from rmm_linear.sketches.seeds import draw_seed, seeds_of

logger = logging.getLogger(__name__)

_WHOLE, _HALVES, _PAIRS = "whole", "halves", "pairs"


@dataclass(frozen=True)
class ElementwiseForm:
    """Which linear layers of a module are around its elementwise code."""

    linears: tuple[str, ...] = ()  # names of its linear layers, of which each is called once
    # Those that read the module's input, in the order of their calls; none where the code reads that itself
    sources: tuple[str, ...] = ()
    sink: str | None = None  # the one that reads the result; None where it is the module's output
    # For each source how its output has the code's inputs: as one, as two halves, or as two in turn
    layouts: tuple[str, ...] = (_WHOLE,)


class PackedElementwise(PackedModule):
    """A module with elementwise code that saves its derivatives in few bits. The output is the module's own."""

    rmm_operation = "activation"
    rmm_form: ElementwiseForm  # where the code begins and ends
    rmm_learns_rows = False  # what is saved has all rows, padding too

    def _set_up(
        self, config: RMMConfig | None, *arguments: Any, form: ElementwiseForm | None = None, **named: Any
    ) -> None:
        super()._set_up(config, *arguments, **named)
        self.rmm_form = form or ElementwiseForm()

    def __setattr__(self, name: str, value: Any) -> None:
        """Look again whether the module is elementwise, with another value of a setting."""
        is_changed = "rmm_form" in vars(self) and changes_setting(self, name, value)
        super().__setattr__(name, value)
        if is_changed:
            original = object.__new__(original_of(type(self)))
            vars(original).update(vars(self))
            widths = {one: width_of(self.get_submodule(one)) for one in self.rmm_form.linears}
            form = elementwise_form(original, {one: width for one, width in widths.items() if width is not None})
            vars(self)["rmm_is_other"] = form != self.rmm_form
            if form != self.rmm_form:
                self._say_exact(f"with {name}={value!r}, its code is not elementwise as it was")

    def forward(self, *args: Any, **named: Any) -> Any:
        """Apply the module; exactly in compiled code, which would fix the derivatives' graph."""
        values = (*args, *named.values())
        input: Any = values[0] if len(values) == 1 else None
        is_tensor = type(input) in (Tensor, nn.Parameter, FakeTensor)  # no logits that are lazy, nor shards
        has_rows = is_tensor and is_dense(input) and input.dim() > 0 and input.is_floating_point()
        if not self.training or torch.compiler.is_compiling() or not has_rows:
            return super().forward(*args, **named)
        call = self._packed_call((), input.device)
        is_trained = input.requires_grad or any(one.requires_grad for one in self.parameters())
        is_exact = call.is_exact or "rmm_is_exact" in vars(self) or vars(self).get("rmm_is_other", False)
        if not is_exact and has_hooks_of_others(self, self.rmm_form.linears, HOOKS):
            self._say_exact("hooks of its linear layers may read what has no graph")
            is_exact = True
        if is_exact or not (torch.is_grad_enabled() and is_trained and input.numel()):
            return super().forward(*args, **named)
        try:
            return self._coded(_Run(self, call), input, args, named)
        except Different:
            self._say_exact("its code does not run as when it was tried")
            vars(self)["rmm_is_exact"] = True  # or it would run twice every time
            return super().forward(*args, **named)

    def _coded(self, run: _Run, input: Tensor, args: Any, named: Any) -> Any:
        if self.rmm_form.sources:
            with intercepted(self, self.rmm_form.linears, run.called) as run.left, run.own_graph():
                output = super().forward(*args, **named)
            return output if self.rmm_form.sink is not None else run.joined(output)
        with run.own_graph():
            output = super().forward(run.given(input))
        try:
            return self._survey(input, run.joined(output), super().forward)
        except RuntimeError as error:  # the derivative by a parameter takes a second derivative, which kernels may lack
            if not run.own:
                raise
            self._say_exact(str(error))
            vars(self)["rmm_is_exact"] = True
            return super().forward(input)

    def _say_exact(self, reason: str) -> None:
        said = set[str]() if self.rmm_context is None else self.rmm_context.checks.said
        if reason not in said:
            said.add(reason)
            name = type(self).__name__.removeprefix("Packed")
            logger.warning("A module of the class %s runs exactly: %s.", name, reason)


class _Run:
    """One call of a module, whose elementwise code runs with a graph of its own."""

    def __init__(self, module: PackedElementwise, call: SavingCall) -> None:
        self.module, self.call, self.form = module, call, module.rmm_form
        self.inputs, self.leaves = list[Tensor](), list[Tensor]()
        inside = {id(one) for name in self.form.linears for one in module.get_submodule(name).parameters()}
        self.own = [one for one in module.parameters() if id(one) not in inside]
        self.hooks = list[Any]()  # for saved tensors, that are set aside
        self.is_over = False
        self.left: dict[int, Passed] = {}  # what the code did not get

    @contextmanager
    def own_graph(self) -> Iterator[None]:
        """Hide from hooks what the code saves, which is gone before the module returns."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _hide(self) -> None:
        while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
            self.hooks.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()

    def _show(self) -> None:
        while self.hooks:
            _autograd._push_saved_tensors_default_hooks(*self.hooks.pop())

    def given(self, input: Tensor) -> Tensor:
        self.inputs.append(input)
        self.leaves.append(input.detach().requires_grad_(input.requires_grad))
        return self.leaves[-1]

    def called(self, name: str, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run a linear layer: a source, or the sink."""
        if self.is_over:
            return original(*args, **named)
        value = self._derived(args[0]) if name == self.form.sink else None
        self._show()
        if value is not None:
            self.is_over = True  # what follows the sink is none of ours
            return original(self._function(*value), *args[1:], **named)
        try:
            output = original(*args, **named)
            return Passed(output, self.given(output))
        finally:
            self._hide()

    def joined(self, output: Tensor) -> Tensor:
        """Return the module's output, as made of its inputs."""
        self._hide()
        try:
            value = self._derived(output)
        finally:
            self._show()
        return self._function(*value)

    def _derived(self, output: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return the output without its graph, and its derivatives, stored."""
        if self.left or not (isinstance(output, Tensor) and self._has_shapes(output)):
            raise Different  # as a pool in one dimension is elementwise where it halves its input, but not elsewhere
        if not output.requires_grad:
            return output, []
        found: list[Tensor | None] = [None] * (len(self.leaves) + len(self.own))
        trained = [i for i, one in enumerate(self.own, len(self.leaves)) if one.requires_grad]
        wanted = [i for i, one in enumerate(self.leaves) if one.requires_grad]
        if wanted:
            ones, leaves = torch.ones_like(output), [self.leaves[i] for i in wanted]
            made = torch.autograd.grad(output, leaves, ones, retain_graph=bool(trained), allow_unused=True)
            for i, one in zip(wanted, made, strict=True):
                found[i] = one
        for i in trained:
            ones = torch.ones_like(output).requires_grad_()
            own = self.own[i - len(self.leaves)]
            (summed,) = torch.autograd.grad(output, own, ones, create_graph=True, allow_unused=True)
            found[i] = None if summed is None else torch.autograd.grad(summed.sum(), ones)[0]
        bits, seed = gated_bits(self.module.rmm_config), draw_seed() if self.call.seed is None else self.call.seed
        with torch.no_grad(), autocast_off(output.device.type):
            stored = [
                None if one is None else pack_source(one, bits, each, False)
                for one, each in zip(found, seeds_of(seed, len(found)), strict=True)
            ]
        return output.detach(), stored

    def _has_shapes(self, output: Tensor) -> bool:
        *rows, columns = output.shape or (1,)
        return all(
            leaf.shape == (output.shape if layout == _WHOLE else (*rows, 2 * columns))
            for leaf, layout in zip(self.leaves, self.form.layouts, strict=True)
        )

    def _function(self, output: Tensor, stored: Sequence[Tensor | None]) -> Tensor:
        if not stored:
            return output
        how = [(layout, leaf.shape, leaf.dtype) for layout, leaf in zip(self.form.layouts, self.leaves, strict=True)]
        bits = gated_bits(self.module.rmm_config)
        return ElementwiseFunction.run(output, how, bits, self.call, list(stored), *self.inputs, *self.own)


class ElementwiseFunction(SavingFunction):
    """An elementwise function of some tensors, with coded derivatives."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        how: list[tuple[str, torch.Size, torch.dtype]],
        bits: int,
        call: SavingCall,
        stored: list[Tensor | None],
        *inputs: Tensor,
    ) -> Tensor:
        """Return the output. how: Layout, shape and dtype of each input; those after them are parameters."""
        ctx.call, ctx.bits, ctx.how, ctx.dtype = call, bits, how, output.dtype
        ctx.parameters = [(one.shape, one.dtype) for one in inputs[len(how) :]]
        ctx.save_for_backward(*stored)
        return as_new(output)  # an input, which the function would return as a view of itself

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply by the derivatives."""
        (y,), saved = grad_outputs, ctx.saved_tensors
        SavingFunction.received(ctx, y, "a packed activation")
        found: list[Tensor | None] = []
        with autocast_off(y.device.type):
            for stored, (layout, shape, dtype) in zip(saved, ctx.how, strict=False):
                if stored is None:
                    found.append(None)
                    continue
                derivative = unpack_source(stored, list(shape), ctx.bits, dtype, False)
                found.append((_repeated(y, layout) * derivative).to(dtype))
            for stored, (shape, dtype) in zip(saved[len(ctx.how) :], ctx.parameters, strict=True):
                if stored is None:
                    found.append(None)
                    continue
                derivative = unpack_source(stored, list(y.shape), ctx.bits, ctx.dtype, False)
                wide = torch.promote_types(y.dtype, torch.float32)
                found.append((y.to(wide) * derivative.to(wide)).sum().to(dtype).expand(shape))
        return None, None, None, None, None, *found


def _repeated(y: Tensor, layout: str) -> Tensor:
    if layout == _WHOLE:
        return y
    return torch.cat((y, y), -1) if layout == _HALVES else y.repeat_interleave(2, -1)


def _lanes(x: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Return the code's inputs in an output of a source."""
    if layout == _WHOLE:
        return (x,)
    return x.chunk(2, -1) if layout == _HALVES else (x[..., ::2], x[..., 1::2])


def _joined(lanes: Sequence[Tensor], layout: str) -> Tensor:
    if layout == _WHOLE:
        return lanes[0]
    return torch.cat(tuple(lanes), -1) if layout == _HALVES else torch.stack(tuple(lanes), -1).flatten(-2)


_ROWS, _COLUMNS = 6, 10  # of what is tried


def elementwise_form(module: nn.Module, linears: dict[str, tuple[int, int]]) -> ElementwiseForm | None:
    """Find out whether a module, or its code between linear layers, is elementwise and saves something for it.

    It is tried on a few numbers: a permutation of the inputs must permute the output, an element that is changed must
    change no other, and gradients must be those by ones times that of the output. A copy is tried, which may remember
    the call; its linear layers do not run.

    linears: in_features and out_features of the children that are linear layers, by name.
    """
    inside = {one for name in linears for one in module.get_submodule(name).modules()}
    others = [one for one in module.modules() if one not in inside]
    parameters = [one for other in others for one in other._parameters.values() if one is not None]
    buffers = [one for other in others for one in other._buffers.values() if one is not None]
    if any(is_lazy(one) or one.numel() != 1 for one in (*parameters, *buffers)):
        return None
    if (parameters or len(linears) > 3) if linears else len(others) > 1:
        return None  # without linear layers, children are tried by themselves
    device = next((one.device for one in (*parameters, *buffers, *module.parameters())), torch.device("cpu"))
    if device.type == "meta":
        return None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            return _Trial(module, linears, device).form()
    except Exception:  # of what takes something else
        return None


def _copied(module: nn.Module, linears: Container[str] = (), depth: list[None] | None = None) -> nn.Module:
    """Copy a module and those in it, with stand-ins for linear layers; calls of children are counted in ``depth``."""
    made = copy.copy(module)
    children = {
        name: nn.Module() if name in linears else child if child is None else _copied(child, (), depth)
        for name, child in module._modules.items()
    }
    vars(made)["_modules"] = children
    buffers = {name: None if one is None else one.detach().clone() for name, one in module._buffers.items()}
    vars(made)["_buffers"] = buffers  # which the module may count in
    if depth is not None:
        for child in (one for name, one in children.items() if name not in linears and one is not None):
            vars(child)["forward"] = functools.partial(_counted, type(child).forward.__get__(child), depth)
    return made


def _counted(forward: Callable[..., Any], depth: list[None], *args: Any, **named: Any) -> Any:
    depth.append(None)
    try:
        return forward(*args, **named)
    finally:
        depth.pop()


class _Trial:
    """Tries a module on a few numbers."""

    def __init__(self, module: nn.Module, linears: dict[str, tuple[int, int]], device: torch.device) -> None:
        self.depth = list[None]()  # of the calls of children that are running
        self.module, self.linears, self.device = _copied(module, linears, self.depth), linears, device
        self.numbers, self.dtype = torch.Generator("cpu").manual_seed(0), torch.float32
        for one in module.parameters():
            self.dtype = torch.promote_types(self.dtype, one.dtype)
        features = next(iter(linears.values()), (_COLUMNS, 0))[0]
        self.x = self._random(features)
        self.given: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.sink: str | None = None

    def _random(self, columns: int) -> Tensor:
        return (torch.randn(_ROWS, columns, generator=self.numbers, device="cpu") * 3).to(self.device, self.dtype)

    def form(self) -> ElementwiseForm | None:
        if self.linears:
            self._output()  # finds the order of the calls
            if not self.order or len(self.order) + (self.sink is not None) != len(self.linears):
                return None
        sources = tuple(self.order)
        width = self._output().shape[-1]
        sizes = [self.given[name].shape[-1] for name in sources] or [self.x.shape[-1]]
        options = [(_WHOLE,) if size == width else (_HALVES, _PAIRS) if size == 2 * width else () for size in sizes]
        for layouts in itertools.product(*options):
            if all(self._is_elementwise(layouts, is_training) for is_training in (True, False)):
                return ElementwiseForm(tuple(self.linears), sources, self.sink, layouts)
        return None

    def _output(self, inputs: Sequence[Tensor] | None = None) -> Tensor:
        """Run the module with other inputs of its code; return the result of the code."""
        forward = type(self.module).forward
        if not self.linears:
            return forward(self.module, self.x if inputs is None else inputs[0])
        made, ends, order = dict(self.given), list[tuple[Tensor, Tensor]](), list[str]()
        if inputs is not None:
            made = dict(zip(self.order, inputs, strict=True))

        def called(name: str, original: Any, input: Tensor) -> Tensor:
            features, outputs = self.linears[name]
            if input is self.x and not ends:
                order.append(name)
                if name not in made:
                    made[name] = self.given[name] = self._random(outputs)
                return made[name]
            if ends or input.shape[-1] != features:
                raise ValueError
            self.sink = name
            ends.append((input, self._random(outputs)))
            return ends[0][1]

        with intercepted(self.module, tuple(self.linears), called):
            output = forward(self.module, self.x)
        if len(set(order)) != len(order) or (self.order and order != self.order):
            raise ValueError
        self.order = order
        return output if self.sink is None else ends[0][0]

    def _is_elementwise(self, layouts: Sequence[str], is_training: bool) -> bool:
        for one in self.module.modules():
            one.training = is_training
        inputs = [self.given[name] for name in self.order] or [self.x]
        lanes = [_lanes(one, layout) for one, layout in zip(inputs, layouts, strict=True)]
        shape = lanes[0][0].shape
        order = torch.randperm(shape.numel(), generator=self.numbers, device="cpu").to(self.device)
        permuted = [[lane.flatten()[order].view(shape) for lane in one] for one in lanes]
        before = [one.clone() for one in inputs]
        with torch.no_grad():
            y, again = self._output(inputs), self._output(before)
            if not isinstance(y, Tensor) or y.shape != shape or any(y.dtype != one.dtype for one in inputs):
                return False
            addresses = {one.untyped_storage().data_ptr() for one in inputs}
            if y.untyped_storage().data_ptr() in addresses or not torch.equal(y, again):
                return False
            if not all(map(torch.equal, inputs, before)):
                return False
            moved = self._output([_joined(one, layout) for one, layout in zip(permuted, layouts, strict=True)])
            # An element at another place is computed by another part of a loop, which may round otherwise.
            if not torch.allclose(moved, y.flatten()[order].view(shape), rtol=1e-5, atol=1e-5):
                return False
            for place, _ in enumerate(inputs):
                changed = [one.clone() for one in inputs]
                changed[place][2, 3] += 1
                if int((self._output(changed) != y).sum()) > 1:
                    return False
        return all(self._has_gradients(layouts, [scale * one for one in inputs]) for scale in (1, 30, 0.01))

    def _has_gradients(self, layouts: Sequence[str], inputs: Sequence[Tensor]) -> bool:
        """Say whether any gradient is that by ones times that of the output, and something is saved for it."""
        saved, leaves = list[int](), [one.clone().requires_grad_() for one in inputs]

        def note(tensor: Tensor) -> Tensor:
            saved.append(0 if self.depth else tensor.nbytes)  # children are tried by themselves
            return tensor.detach()  # an output that its node saves would never be freed

        held = {id(one) for one in self._held()}
        if self.linears:
            self.x = self.x.detach().requires_grad_()  # which sources alone may read
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            found = self._output(leaves)
        own = {id(one) for one in (*leaves, *self.module.parameters())}
        if not sum(saved) or not all(id(one) in own for one in graph_leaves([found])):  # of no other module
            return False
        if any(one.requires_grad and id(one) not in held for one in self._held()):
            return False  # that other code may read
        y, ones = torch.randn(found.shape, generator=self.numbers, device="cpu").to(found), torch.ones_like(found)
        got, by_ones = (
            torch.autograd.grad(found, leaves, one, retain_graph=True, allow_unused=True) for one in (y, ones)
        )
        return all(
            one is None
            or torch.allclose(one, _repeated(y, layout) * other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
            for one, other, layout in zip(got, by_ones, layouts, strict=True)
            if other is not None or one is not None
        )

    def _held(self) -> list[Tensor]:
        names = ("_parameters", "_buffers", "_modules")
        found = [value for one in self.module.modules() for name, value in vars(one).items() if name not in names]
        return [one for one in tree_leaves(found) if isinstance(one, Tensor)]

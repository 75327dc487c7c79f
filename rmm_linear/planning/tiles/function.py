"""Run a function on slices of its rows, forward and backward, and hand every gradient to autograd once.

The parameters are inputs of the autograd function, which returns their gradients. So AccumulateGrad, and all that
listens to it (DDP, FSDP2), sees every parameter once in a backward pass, whatever the number of slices. Gradients of
16-bit parameters are summed over the slices in float32, and rounded once: summed in 16 bits, their error would grow
with the number of slices, as every partial sum would be rounded.

There are two ways. :class:`RepeatedTile` saves the streams alone, and runs every slice again in the backward pass.
:class:`CodedTile` is for functions that save little by themselves (compressed activations): every slice runs once, and
its graph stays, without the slice and without its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from rmm_linear._support.saved_graph import graph_leaves
from rmm_linear.context.surroundings import one_backward
from rmm_linear.planning.replay.replayed import Replayed, Seen, generator_states
from rmm_linear.planning.tiles.sampled import SampledSlices, saved
from rmm_linear.planning.tiles.slices import RowSlices

_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # pyright: ignore[reportAttributeAccessIssue]

_FREED = "Trying to backward through a tile a second time, but what it saved is freed. Use retain_graph=True in the "
_FREED += "first backward pass."


@dataclass(eq=False)
class TileCall:
    """One call of a function that runs in slices."""

    run: Callable[[Sequence[Tensor]], Any]  # takes a slice of every stream, and the other tensors
    cut: RowSlices  # the slices
    streams: int  # how many of the tensors are streams; the others follow
    others: int  # how many these are; the trained parameters follow
    replayed: Replayed | None  # runs the function again as it ran; None where it runs once
    name: str  # of the module, for errors
    # Saves what slices that a simulated step leaves out would save; only for CodedTile
    sampled: SampledSlices | None = None
    structure: Any = None  # of what the function returns, known after the first slice
    # For every leaf of it, whether it is a tensor, and what it is if it is none
    rest: list[tuple[bool, Any]] = field(default_factory=list)

    def outputs(
        self, tensors: Sequence[Tensor], enter: Callable[[Sequence[Tensor]], Any] | None = None
    ) -> list[Tensor]:
        """Run all slices, and return the outputs; ``enter`` runs one instead of ``run``."""
        wholes = list[Tensor]()
        for begin, length in self.cut.slices:
            found = self.leaves((enter or self.run)(self.parts(tensors, begin, length)))
            if not wholes:
                wholes = [self.cut.whole_like(one, length) for one in found]
            for whole, part in zip(wholes, found, strict=True):
                self.cut.place(whole, part.detach(), begin, length)
            del found
        return wholes

    def parts(self, tensors: Sequence[Tensor], begin: int, length: int) -> list[Tensor]:
        """Return what a slice is given, without a graph."""
        cut = [self.cut.part(one.detach(), begin, length) for one in tensors[: self.streams]]
        return cut + [one.detach() for one in tensors[self.streams : self.streams + self.others]]

    def leaves(self, output: Any) -> list[Tensor]:
        """Take apart what the function returned."""
        leaves, self.structure = tree_flatten(output)
        self.rest = [(True, None) if isinstance(leaf, Tensor) else (False, leaf) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def output(self, wholes: Iterable[Tensor]) -> Any:
        """Put together what the function would have returned for all rows."""
        given = iter(wholes)
        leaves = [next(given) if is_tensor else one for is_tensor, one in self.rest]
        return tree_unflatten(leaves, self.structure)

    def check_leaves(self, outputs: Sequence[Tensor], known: Iterable[Tensor]) -> None:
        """Raise where a gradient would be lost, of a tensor that is no input of the autograd function."""
        ids = {id(one) for one in known}
        lost = [one for one in graph_leaves(outputs) if id(one) not in ids]
        if lost:
            raise RuntimeError(
                f"A tile hands gradients on to its inputs and parameters alone, but {self.name} reads a tensor of "
                f"shape {tuple(lost[0].shape)} that needs a gradient and is neither. Pass it as an argument, make it a "
                "parameter of the module, or leave the module out of modules=."
            )


class _TileFunction(torch.autograd.Function):
    """Base class of functions that run in slices."""

    @staticmethod
    def _results(ctx: Any, gradients: Sequence[Tensor | None], slices: Callable[..., Any]) -> tuple[Tensor | None, ...]:
        """Run the backward pass; ``slices`` yields each slice's outputs or edges, and what gradients are wanted of."""
        call: TileCall = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{call.name} runs in tiles, which do not support double backward, so a backward pass with "
                "create_graph=True is not possible. Use rmm_linear.revert(model), or leave it out of modules=."
            )
        needs = ctx.needs_input_grad[1:]
        flat = [None if one is None else call.cut.as_rows(one) for one in gradients]
        wholes = [_empty(shape) if need else None for shape, need in zip(ctx.shapes, needs, strict=False)]
        trained = iter(ctx.trained)  # some may be frozen since
        wanted = [number for number, need in enumerate(needs[call.streams :]) if need]
        wanted = [number for number in wanted if number < call.others or next(trained).requires_grad]
        sums = GradientSums(len(wanted), len(call.cut.slices))
        for (begin, length), (ends, starts) in zip(call.cut.slices, slices(), strict=True):
            pairs = [
                (end, call.cut.part(one, begin, length))
                for end, one in zip(ends, flat, strict=True)
                if end is not None and one is not None
            ]
            found = _gradients(pairs, starts, retain=ctx.needs_graph and _keeps_graph())
            del ends, starts, pairs
            for whole in wholes:
                if whole is not None:
                    part = found.pop(0)
                    part = _zeros(call.cut.part(whole, begin, length)) if part is None else part
                    call.cut.place(whole, part, begin, length)
            sums.add(found)
            del found
        of_rest: list[Tensor | None] = [None] * (len(needs) - call.streams)
        for number, total, dtype in zip(wanted, sums.totals, [ctx.dtypes[n] for n in wanted], strict=True):
            of_rest[number] = None if total is None else total.to(dtype)
        return None, *wholes, *of_rest


class RepeatedTile(_TileFunction):
    """Saves the streams, and runs every slice again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, call: TileCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the slices without gradients."""
        replayed: Any = call.replayed
        given = call.streams + call.others
        # Saved first: a checkpoint around it that runs again ends here, where nothing else is saved after this.
        ctx.saved = saved(tensors[:given])
        seen = replayed.seen()
        with replayed.autocast():
            wholes = call.outputs(tensors)
        ctx.call, ctx.seen = call, _as_drawn(seen, replayed)
        ctx.trained = [
            one for one, need in zip(tensors[given:], ctx.needs_input_grad[1 + given :], strict=True) if need
        ]
        _set_up(ctx, call, tensors, wholes)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run every slice again, with a graph of its own."""
        call: TileCall = ctx.call
        replayed: Any = call.replayed
        if ctx.saved is None:
            raise RuntimeError(_FREED)
        needs, streams = ctx.needs_input_grad[1:], ctx.saved.saved_tensors
        if not _keeps_graph():
            ctx.saved = None

        def slices() -> Iterator[tuple[list[Tensor | None], list[Tensor]]]:
            is_first = True
            for begin, length in call.cut.slices:
                with torch.enable_grad(), replayed.autocast():
                    parts = _entered(call.parts(streams, begin, length), needs)
                    found = call.leaves(call.run(parts))
                starts = [one for one, need in zip(parts, needs, strict=False) if need]
                if is_first:
                    call.check_leaves(found, [*map(_anchor_of, starts), *ctx.trained])
                    is_first = False
                starts += [one for one in ctx.trained if one.requires_grad]
                ends = [one if one.requires_grad else None for one in found]
                del found, parts
                yield ends, starts
                del ends, starts

        if all(one is None for one in gradients):
            return (None,) * len(ctx.needs_input_grad)
        with replayed.again(ctx.seen), _without_hooks(ctx.trained):
            return RepeatedTile._results(ctx, gradients, slices)


class CodedTile(_TileFunction):
    """Keeps the graph of every slice, whose modules save codes, and runs nothing again."""

    @staticmethod
    def forward(ctx: Any, call: TileCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the slices with gradients, and keep where their graphs begin and end."""
        needs, given = ctx.needs_input_grad[1:], call.streams + call.others
        trained = [one for one in tensors[given:] if one.requires_grad]
        graphs: list[Any] = []
        sampled = call.sampled

        def enter(parts: Sequence[Tensor]) -> Any:
            if sampled is not None and graphs:
                graphs.extend(sampled.left_out())
            with torch.enable_grad(), nullcontext() if sampled is None else sampled.running():
                entered = _entered(parts, needs)
                found = call.run(entered)
                starts = [get_gradient_edge(one) for one, need in zip(entered, needs, strict=False) if need]
                leaves = call.leaves(found)
                ends = [get_gradient_edge(one) if one.requires_grad else None for one in leaves]
            if not graphs:
                known = [_anchor_of(one) for one, need in zip(entered, needs, strict=False) if need]
                call.check_leaves([one for one in leaves if one.requires_grad], [*known, *trained])
            graphs.append((ends, starts))
            return found

        wholes = call.outputs(tensors, enter)
        ctx.call, ctx.graphs, ctx.trained = call, graphs, trained
        _set_up(ctx, call, tensors, wholes, needs_graph=True)
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        is_kept = _keeps_graph()

        def slices() -> Iterator[tuple[list[GradientEdge | None], list[Any]]]:
            for number, graph in enumerate(ctx.graphs):
                if graph is None:
                    raise RuntimeError(_FREED)
                if not is_kept:
                    ctx.graphs[number] = None
                if not isinstance(graph, tuple):
                    del graph  # of a slice that a simulated step left out
                    continue
                ends, starts = graph
                del graph
                yield ends, [*starts, *(one for one in ctx.trained if one.requires_grad)]

        if all(one is None for one in gradients):
            return (None,) * len(ctx.needs_input_grad)
        with one_backward(), _without_hooks(ctx.trained):  # what is offloaded comes back once for all slices
            return CodedTile._results(ctx, gradients, slices)


class _Entry(torch.autograd.Function):
    """Begins the graph of a slice at a node that does not hold the slice, as a leaf would."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, part: Tensor) -> Tensor:
        return torch.ops.aten._unsafe_view.default(part, part.shape)  # shares its memory, and is no view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _entered(parts: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [
        _Entry.apply(one.new_empty(0).requires_grad_(), one) if need else one
        for one, need in zip(parts, needs, strict=False)
    ]


def _anchor_of(entered: Any) -> Tensor:
    """Return the leaf behind a slice, which has no elements."""
    return entered.grad_fn.next_functions[0][0].variable


class GradientSums:
    """GradientSums of parameters' gradients over slices: in float32 for 16-bit ones, which round once at the end."""

    def __init__(self, count: int, slices: int) -> None:
        """Begin with nothing."""
        self.totals: list[Tensor | None] = [None] * count
        self.is_single = slices == 1

    def add(self, found: Sequence[Tensor | None]) -> None:
        """Add the gradients of one slice, which may be one another, or parts of each other."""
        storages = [None if one is None else _storage(one) for one in found]
        for number, one in enumerate(found):
            total = self.totals[number]
            if one is None:
                continue
            if total is not None:
                total.add_(one)
            elif one.is_floating_point() and one.itemsize < 4 and not self.is_single:
                self.totals[number] = one.float()
            else:
                is_own = storages[number] is not None and storages.count(storages[number]) == 1
                self.totals[number] = one if is_own else one.clone()


def _storage(gradient: Tensor) -> int | None:
    """Return the memory of a gradient that fills it; None where something else may have it."""
    if gradient.layout is not torch.strided or not gradient.is_contiguous():
        return None
    storage = gradient.untyped_storage()
    return storage._cdata if storage.nbytes() == gradient.numel() * gradient.itemsize else None


def _gradients(pairs: Sequence[tuple[Any, Tensor]], starts: Sequence[Any], *, retain: bool) -> list[Tensor | None]:
    if not pairs or not starts:
        return [None] * len(starts)
    ends, given = zip(*pairs, strict=True)
    return list(torch.autograd.grad(ends, starts, given, allow_unused=True, retain_graph=retain))


def _set_up(
    ctx: Any, call: TileCall, tensors: Sequence[Tensor], wholes: Sequence[Tensor], *, needs_graph: bool = False
) -> None:
    ctx.needs_graph = needs_graph
    ctx.shapes = [(one.shape, one.dtype, one.device) for one in tensors[: call.streams]]
    ctx.dtypes = [one.dtype for one in tensors[call.streams :]]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(one for one in wholes if not (one.is_floating_point() or one.is_complex())))


def _empty(like: tuple[torch.Size, torch.dtype, torch.device]) -> Tensor:
    shape, dtype, device = like
    return torch.empty(shape, dtype=dtype, device=device)


def _zeros(like: Tensor) -> Tensor:
    return like.new_zeros(()).expand(like.shape)


def _as_drawn(seen: Seen, replayed: Replayed) -> Seen:
    """Drop the states of the generators where nothing was drawn: the CPU's takes 5 KB."""
    with _disable_current_modes():  # states are no fake tensors, whatever else is
        is_unused = generator_states(replayed.devices, seen.generators) is seen.generators
    return Seen([], seen.buffers) if is_unused else seen


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Keep hooks of parameters' gradients from the parts of a gradient: they get the whole one."""
    with ExitStack() as stack:
        for one in parameters:
            hooks: Any = one._backward_hooks
            if hooks:
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield

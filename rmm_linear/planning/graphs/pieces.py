"""Run a graph in pieces, some of which are recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rmm_linear.memory.peak import Peak
from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.step.flops import flop_counter
from rmm_linear.planning.step.follow import FollowedTensors, followed
from rmm_linear.planning.step.step import loss_of
from rmm_linear.planning.step.workspace import Workspace


class RecomputedPiece(nn.Module):
    """A piece of a graph under activation checkpointing."""

    def __init__(self, piece: nn.Module, written: Sequence[int], *, random: bool, to_the_end: bool) -> None:
        """Wrap a piece that writes some of its arguments, may draw, and may have to run ``to_the_end`` again."""
        super().__init__()
        self.piece = piece
        self.written = tuple(written)
        self.random = random
        self.to_the_end = to_the_end

    def forward(self, *args: Any) -> Any:
        """Run the piece, and again in the backward pass."""
        if not torch.is_grad_enabled():
            return self.piece(*args)
        written: dict[int, Tensor] = {place: args[place] for place in self.written}
        others = [each for place, each in enumerate(args) if place not in written]
        replayed = Replayed(arguments=others, written=[*written.values()])
        seen = replayed.seen()

        def run(*others: Any) -> Any:
            # What is changed is no argument of checkpoint, which would find it changed in the backward pass.
            rest = iter(others)
            return self.piece(*(written[place] if place in written else next(rest) for place in range(len(args))))

        with set_checkpoint_early_stop(not self.to_the_end):
            return checkpoint(
                run,
                *others,
                use_reentrant=False,
                preserve_rng_state=self.random,
                context_fn=lambda: (nullcontext(), replayed.again(seen)),
            )


def run_in_pieces(
    costs: GraphCosts, part: Sequence[int], recomputed: set[int], order: Sequence[int] = ()
) -> fx.GraphModule:
    """Split a graph and recompute some of its parts; ``order`` is that of the nodes, if it is another one."""
    ordered = _in_order(costs, part, order) if recomputed or order else costs.graph
    if not recomputed:
        return ordered
    where = {node.name: part[place] for place, node in enumerate(costs.nodes)}
    split = split_module(ordered, ordered, lambda node: where.get(node.name, 0), keep_original_order=True)  # type: ignore[arg-type]
    for node in list(split.graph.nodes):
        number = int(node.target.split("_")[1]) if node.op == "call_module" else -1
        if number in recomputed:
            written = [
                i for i, each in enumerate(node.args) if isinstance(each, fx.Node) and each.name in costs.written
            ]
            random = any(drawn for place, drawn in enumerate(costs.random) if part[place] == number)
            to_the_end = any(part[place] == number for place in costs.effects)
            piece = split.get_submodule(node.target)
            setattr(split, node.target, RecomputedPiece(piece, written, random=random, to_the_end=to_the_end))
    split.recompile()
    return split


def _in_order(costs: GraphCosts, part: Sequence[int], order: Sequence[int]) -> fx.GraphModule:
    """Return the graph with the nodes of each part one after another, as they will run."""
    order = sorted(order or range(costs.count), key=part.__getitem__)
    if all(first < second for first, second in pairwise(order)):
        return costs.graph
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    known = set(costs.nodes)
    others = [node for node in costs.graph.graph.nodes if node not in known]
    end = [node for node in others if node.op == "output"]
    for node in [*(n for n in others if n.op != "output"), *(costs.nodes[place] for place in order), *end]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(costs.graph, graph)


def simulate_graph(costs: GraphCosts, run: fx.GraphModule, workspace: Workspace | None = None) -> Peak:
    peak = Peak(measure="simulated live tensors")
    with costs.mode, followed(run) as place, FollowedTensors(peak, place, workspace) as live:
        graph_step(run, costs.inputs)
        for each in costs.inputs:
            if isinstance(each, Tensor) and each.grad is not None:
                live.finished(each.grad, None)
        live.finish()
    return peak


def graph_flops(costs: GraphCosts, run: Callable[..., Any]) -> int:
    """Count the floating-point operations of a forward and a backward pass."""
    with costs.mode, flop_counter() as counter:
        graph_step(run, costs.inputs)
    return counter.get_total_flops()


def graph_step(run: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """Run a forward and a backward pass of a graph; gradients are left in ``.grad`` of its inputs."""
    for each in inputs:
        if isinstance(each, Tensor):
            each.grad = None
    with torch.enable_grad():
        loss_of(_loss_or_all(run(*inputs))).backward()


def _loss_or_all(outputs: Any) -> Any:
    """Return a graph's first output if that is a scalar, as a loss is."""
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    return first if isinstance(first, Tensor) and first.dim() == 0 and first.requires_grad else outputs

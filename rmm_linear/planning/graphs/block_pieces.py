"""Recompute every block of the module tree that a graph shows: for models that are captured as several graphs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import fx

from rmm_linear.planning.graphs.pieces import graph_flops, run_in_pieces, simulate_graph
from rmm_linear.planning.graphs.plan import GraphPlan, fingerprint, planned_pieces
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.flops import by_plain


def block_pieces(graph: fx.GraphModule, inputs: Sequence[Any]) -> GraphPlan:
    """Plan a graph in which every entry of a list of modules is recomputed; all of it, if it shows none.

    Graphs that come after it are not known, so the last block of this one is recomputed too.

    Args:
        graph: A captured graph.
        inputs: Its inputs.

    Returns:
        The plan, with ``method="blocks"``; what lies between blocks is kept.
    """
    costs = graph_costs(graph, inputs)
    legal = {0, *costs.legal_cuts()}
    blocks = blocks_of(costs.nodes)
    changes = [0, *(place for place in range(1, costs.count) if blocks[place] != blocks[place - 1])]
    begins = sorted({next((cut for cut in range(place, costs.count) if cut in legal), 0) for place in changes} | {0})
    part, recomputed = [0] * costs.count, set[int]()
    for number, (begin, end) in enumerate(pairwise([*begins, costs.count])):
        part[begin:end] = [number] * (end - begin)
        if any(blocks[begin:end]) or not any(blocks):
            recomputed.add(number)
    run = run_in_pieces(costs, part, recomputed)
    plain, peak = simulate_graph(costs, graph).bytes, simulate_graph(costs, run).bytes
    flops = by_plain(graph_flops(costs, run), graph_flops(costs, graph))
    pieces = planned_pieces(costs, part, recomputed)
    return GraphPlan("blocks", fingerprint(graph, inputs), part, sorted(recomputed), pieces, 0, peak, plain, flops)


def blocks_of(nodes: Sequence[fx.Node]) -> list[str]:
    """Say which entry of a list of modules each node belongs to: the outermost one that has modules inside.

    Args:
        nodes: Of a captured graph.

    Returns:
        The names that dynamo has for them; empty where there is none.
    """
    paths = [[path for path, _ in node.meta.get("nn_module_stack", {}).values()] for node in nodes]
    inside = {outer for path in paths for outer in path[:-1]}
    entries = {path for path in inside if re.search(r"(\['\d+'\]|\[\d+\]|\.\d+)$", path)}
    return [next((each for each in path if each in entries), "") for path in paths]

"""A memory budget for torch.compile that holds: partitions of a joint graph are judged by the peak of their two graphs.

torch.compile's own ``activation_memory_budget`` bounds what the forward pass saves, by a knapsack over single nodes.
What the backward pass computes again at once is not counted, so that a smaller budget may have the higher peak. Here
the results are saved that divide the forward pass into segments (Chen et al. 2016), of which one is computed again at
once; inside of them the knapsack only makes proposals, and the peaks of these are counted, tensor by tensor.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import logging
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from rmm_linear._support.sizes import show_bytes
from rmm_linear.planning.budget import LEAST, BudgetError, read_budget, shown_budget, shown_least
from rmm_linear.planning.step.flops import operations

_logger = logging.getLogger(__name__)

_OPERATIONS_PER_BYTE = 50  # what moving a byte takes, in floating-point operations: an estimate for any device
_SHARES = tuple(n / 20 for n in range(20, -1, -1))  # of what a knapsack may save
_SAVED = CheckpointPolicy.MUST_SAVE
_ASKED = 1e-9  # the budget at which torch asks its solver wherever there is something to choose


@dataclass(frozen=True)
class Partition:
    """A joint graph that is split into a forward and a backward pass.

    Attributes:
        peak: Bytes alive at once of what the two make: saved activations, temporary tensors, outputs and gradients.
            Parameters and the batch are not counted, nor what fused kernels spare or use besides.
        work: Operations of both, and the bytes that they write in units of operations: an estimate.
    """

    peak: int
    work: float

    @classmethod
    def of(cls, forward: fx.Graph, backward: fx.Graph, outputs: int) -> Partition:
        """Judge two graphs, node by node; the first outputs of the forward pass stay with the caller."""
        returned, gradients = (tree_leaves(each.output_node().args) for each in (forward, backward))
        first, second = ([node for node in each.nodes if node.op != "output"] for each in (forward, backward))
        peak = _step_peak(first, returned, returned[:outputs], second, (), gradients)
        return cls(peak, sum(map(_work, (*first, *second))))


class KnapsackSolver:
    """A solver for ``torch._functorch.config.activation_memory_budget_solver`` whose peaks fall with the budget.

    torch asks it, graph by graph, which results of expensive operators to compute again. Its proposals are judged by
    their peaks, and of those that save no more than torch's share the fastest is taken whose peak is no higher than
    those of all that save more; where there is none, the best of these, as it needs less memory for all that it saves.
    torch does not ask where its heuristics meet the budget by themselves, nor at 0, where it computes everything again.

    Args:
        memory: Bytes, or a text such as "8GB", for what a step of a graph makes: of all proposals within it the
            fastest is taken, otherwise that of the least peak, whatever torch's share is. None goes by torch's share.
        segments: Save what crosses between segments of the forward pass. Few models need less without.

    Raises:
        RuntimeError: If this version of PyTorch asks no solvers of others.
        ValueError: If ``memory`` is no size.

    Example:
        >>> torch._functorch.config.activation_memory_budget_solver = KnapsackSolver()  # doctest: +SKIP
        >>> torch._functorch.config.activation_memory_budget = 0.1  # doctest: +SKIP
    """

    def __init__(self, memory: int | str | None = None, *, segments: bool = True) -> None:
        """Read the budget."""
        _extends("CustomKnapsackSolver", KnapsackSolver)
        self.memory = memory if memory is None else read_budget(memory, 0)
        if self.memory == 0:
            raise ValueError(
                f'memory must be bytes, or a text such as "8GB", got {memory!r}. Shares are torch\'s own: '
                'activation_memory_budget = 0.1. compile_budget() takes shares of the peak, and "least".'
            )
        self.segments = segments
        self.is_fastest = True  # whether what was chosen last runs the least again of all that is proposed

    def __call__(
        self, memory: list[float], joint_graph: fx.Graph, max_memory: float, node_info: Any, candidates: list[fx.Node]
    ) -> tuple[list[int], list[int]]:
        """Return the indices of the candidates to save, and of those to compute again."""
        _pin(joint_graph)
        borders = _borders(node_info.required_fw_nodes) if self.segments else ()
        for node in borders:
            node.meta["recompute"] = _SAVED
        proposals = _proposals(memory, candidates, borders)
        peak = functools.cache(lambda place: _peak_of(joint_graph, node_info, candidates, proposals[place].again))
        if self.memory is None:
            place = _by_share([each.saved for each in proposals], peak, max_memory)
        else:
            place = _by_bytes(range(len(proposals)), peak, self.memory)
        self.is_fastest = place == 0
        again = proposals[place].again
        return sorted({*range(len(memory))} - {*again}), list(again)

    def uuid(self) -> str:
        """Name what cached graphs depend on."""
        return _hash((self.memory, self.segments))


@dataclass(frozen=True)
class _Proposal:
    """What is computed again, and what is saved, as one of torch's shares."""

    again: tuple[int, ...]
    saved: float


def _proposals(memory: Sequence[float], candidates: Sequence[fx.Node], borders: Sequence[fx.Node]) -> list[_Proposal]:
    """Make proposals, from the fewest operations on."""
    from torch._functorch._activation_checkpointing.knapsack import dp_knapsack

    repeatable = [place for place, node in enumerate(candidates) if node.meta.get("recompute") != _SAVED]
    sizes, flops = [memory[i] for i in repeatable], [float(max(_flops(candidates[i]), 1)) for i in repeatable]
    share_of_byte = max(share / max(_bytes(node), 1) for share, node in zip(memory, candidates, strict=True))
    between = share_of_byte * sum(map(_bytes, borders))
    found = dict[tuple[int, ...], tuple[float, _Proposal]]()
    for share in _SHARES:
        _, _, again = dp_knapsack(sizes, flops, share)
        places = tuple(sorted(repeatable[i] for i in again))
        saved = sum(memory) - sum(memory[i] for i in places) + between
        found.setdefault(places, (sum(flops[i] for i in again), _Proposal(places, saved)))
    return [made for _, made in sorted(found.values(), key=lambda each: each[0])]


def _pin(graph: fx.Graph) -> None:
    """Let torch save what would be another result when it runs again, which it does not look at by itself.

    That are random numbers, what is computed from inputs that the step changes, as BatchNorm's statistics, and results
    of other libraries' operators, such as codes, which may draw numbers or not and do not always say so.
    """
    returned = tree_leaves(graph.output_node().meta.get("desc", ()))
    changed = [each.mutated_input for each in returned if hasattr(each, "mutated_input")]
    inputs = {node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in changed}
    inputs |= {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    for node in graph.nodes:
        if node.op == "call_function" and (_is_random(node) or not inputs.isdisjoint(node.all_input_nodes)):
            node.meta["recompute"] = _SAVED


def _is_random(node: fx.Node) -> bool:
    """Say whether a node may draw numbers; attention does with dropout alone, whatever its tag says."""
    if getattr(node.target, "namespace", "aten") not in ("aten", "prims", "prim"):
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    if "dropout_p" not in names:
        return True
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("dropout_p", 0.0) != 0.0


def _borders(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The results that cross from a segment to the next, between as many segments as have the least peak."""
    made, size, last = dict[int, int](), dict[int, int](), dict[int, int]()
    for place, node in enumerate(nodes):
        for key, count in _storages(node):
            if key not in made and node.op == "call_function":
                made[key], size[key] = place, count
        last.update((key, place) for read in node.all_input_nodes for key, _ in _storages(read) if key in made)
    changes, written = [0] * (len(nodes) + 1), [0] * len(nodes)
    for key, place in made.items():
        written[place] += size[key]
        changes[place + 1] += size[key] if key in last else 0
        changes[last.get(key, place) + 1] -= size[key] if key in last else 0
    crossing, before = list(accumulate(changes)), list(accumulate(written, initial=0))
    inner = [place for place in range(len(nodes)) if 0 < before[place] < before[-1] and crossing[place]]
    if not inner:
        return ()
    narrow = sorted(crossing[place] for place in inner)[len(inner) // 20]
    count = round(math.sqrt(before[-1] / narrow))
    found = set[int]()
    for middle in (before[-1] * segment / count for segment in range(1, count)):
        near = [place for place in inner if abs(before[place] - middle) <= before[-1] / count / 2]
        cut = min(near, key=lambda place: (crossing[place], abs(before[place] - middle)), default=0)
        found.update(made[key] for key, place in last.items() if made[key] < cut <= place)
    return tuple(nodes[place] for place in sorted(found))


def _peak_of(graph: fx.Graph, info: Any, candidates: Sequence[fx.Node], again: Iterable[int]) -> int:
    """The peak of the partition that torch will make of a graph if it may compute some of the candidates again."""
    from torch._functorch import config
    from torch.utils._ordered_set import OrderedSet

    partitioners = _partitioners()
    options = partitioners.MinCutOptions(
        ban_if_used_far_apart=False, ban_if_long_fusible_chains=False, ban_if_materialized_backward=False,
        ban_if_not_in_allowlist=False, ban_if_reduction=config.ban_recompute_reductions,
    )  # fmt: skip
    saved, _ = partitioners.solve_min_cut(graph, info, options, OrderedSet(candidates[i] for i in again))
    return _split_peak(graph, info, saved)


def _split_peak(graph: fx.Graph, info: Any, saved: Iterable[fx.Node]) -> int:
    """The peak of what torch makes of a graph whose forward pass saves these results, without making two graphs."""
    results = tree_leaves(graph.output_node().args, is_leaf=lambda each: each is None)
    count = len(results) - sum(map(_is_given, graph.nodes))  # of each, the backward pass returns a gradient, or None
    returned, gradients = results[:count], results[count:]
    place = {node: at for at, node in enumerate(graph.nodes)}
    saved = set(saved)
    read = _needed(gradients, saved)
    saved &= read
    forward = sorted(_needed([*returned, *saved, *_changes(graph, info)], ()), key=place.__getitem__)
    backward = _in_order(sorted(read, key=place.__getitem__), saved, place)
    return _step_peak(_raised(forward), [*returned, *saved], returned, _raised(backward, saved), saved, gradients)


def _changes(graph: fx.Graph, info: Any) -> list[fx.Node]:
    """What writes into inputs of the step in the forward pass."""
    found = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [node for node in found if info.is_required_fw(node)]


def _needed(results: Iterable[Any], given: Collection[fx.Node]) -> set[fx.Node]:
    """All that is computed for results, and what of the given they read."""
    found, waiting = set[fx.Node](), [node for node in results if isinstance(node, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in given else node.all_input_nodes
    return found


def _in_order(nodes: Sequence[fx.Node], given: Collection[fx.Node], place: dict[fx.Node, int]) -> list[fx.Node]:
    """The order of the backward pass: what runs again does so as late as it can, as torch reorders it."""
    inputs = [node for node in nodes if node.op == "placeholder" or node in given]
    first = min((at for at, node in enumerate(nodes) if _is_first(node, given)), default=0)
    found = dict.fromkeys(inputs)
    for node in nodes[first:]:
        missing = _needed([node], found.keys()) - found.keys()
        found.update(dict.fromkeys(sorted(missing, key=place.__getitem__)))
    return list(found)


def _is_first(node: fx.Node, given: Collection[fx.Node]) -> bool:
    """Say whether a node reads a gradient that the caller gives."""
    return node not in given and any("tangents" in str(read.target) for read in node.all_input_nodes)


def _raised(nodes: Sequence[fx.Node], given: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The same nodes, with the parts of a result directly after it."""
    is_part = {node for node in nodes if node.target is operator.getitem and node not in given}
    parts = dict[fx.Node, list[fx.Node]]()
    for node in nodes:
        if node in is_part:
            parts.setdefault(node.all_input_nodes[0], []).append(node)

    def with_parts(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for part in parts.get(node, ()):
            yield from with_parts(part)

    return [each for node in nodes if node not in is_part for each in with_parts(node)]


def _by_bytes(places: range, peak: Callable[[int], int], memory: int) -> int:
    """The first, so the fastest, within the memory; otherwise that of the least peak.

    Peaks fall from the fastest on, by and large: behind it, the first is bisected.
    """
    if peak(0) <= memory:
        return 0
    first = bisect.bisect_left(places, True, lo=1, key=lambda place: peak(place) <= memory)
    if first < len(places):
        return first
    return next((place for place in places if peak(place) <= memory), min(places, key=peak))


def _by_share(saved: Sequence[float], peak: Callable[[int], int], share: float) -> int:
    """The fastest up to a share whose peak is no higher than the least above; otherwise that one."""
    places = range(len(saved))
    best = min([place for place in places if saved[place] >= share] or [saved.index(max(saved))], key=peak)
    return next((place for place in places if saved[place] <= share and peak(place) <= peak(best)), best)


def _is_given(node: fx.Node) -> bool:
    """Say whether a graph gets a tensor from outside, where it stays: a parameter, a buffer, the batch."""
    return node.op == "placeholder" and str(node.target).startswith("primals")


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """Storages of a node's results, which views share, and their bytes."""
    stores = [each.untyped_storage() for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
    return [(store._cdata, _number(store.nbytes())) for store in stores]


def _bytes(node: fx.Node) -> int:
    return sum(count for _, count in _storages(node))


def _number(size: Any) -> int:
    """A size; of a dynamic one, what it was in the batch that is compiled."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _step_peak(
    forward: Sequence[fx.Node], returned: Sequence[Any], held: Sequence[Any],
    backward: Sequence[fx.Node], given: Collection[fx.Node], gradients: Sequence[Any],
) -> int:  # fmt: skip
    """Bytes alive at once in two passes, from their nodes in order and what they return; the caller holds some."""
    kept = {key: size for node in held if isinstance(node, fx.Node) for key, size in _storages(node)}
    return max(_peak(forward, (), returned, {}), _peak(backward, given, gradients, kept))


def _peak(nodes: Sequence[fx.Node], given: Collection[fx.Node], returned: Iterable[Any], held: dict[int, int]) -> int:
    """Bytes alive at once while nodes run, without what they get from outside; ``held`` storages live to the end."""
    size, born, last, end = dict(held), dict.fromkeys(held, 0), dict[int, int](), len(nodes)
    for place, node in enumerate(nodes):
        for key, count in _storages(node):
            born.setdefault(key, place)
            size.setdefault(key, 0 if _is_given(node) or node.op == "get_attr" else count)
            last[key] = place
        for read in () if node in given else node.all_input_nodes:
            last.update((key, place) for key, _ in _storages(read))
    for node in returned:
        last.update((key, end) for key, _ in (_storages(node) if isinstance(node, fx.Node) else ()))
    changes = [0] * (end + 2)
    for key, place in born.items():
        changes[place] += size[key]
        changes[(end if key in held else last[key]) + 1] -= size[key]
    return max(accumulate(changes))


def _work(node: fx.Node) -> float:
    """Operations of a node, and what it writes in units of them; views are free."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.is_view:
        return 0.0
    return _flops(node) + _OPERATIONS_PER_BYTE * _bytes(node)


def _flops(node: fx.Node) -> int:
    args, named = tree_map_only(fx.Node, lambda each: each.meta.get("val"), (node.args, node.kwargs))
    return _number(operations(node.target, args, named, node.meta.get("val")))


class CompileBudget:
    """What :func:`compile_budget` found.

    Attributes:
        graphs: Of each training graph: its partition without a budget, and the one that it runs by.
    """

    def __init__(self, memory: int | float | str) -> None:
        """Read the budget."""
        _extends("CustomPartitionerFn", CompileBudget)
        KnapsackSolver()  # says at once if torch asks none
        read_budget(memory, 1)  # or if this is none
        self.memory = memory
        self.graphs: list[tuple[Partition, Partition]] = []

    def __call__(self, joint: fx.GraphModule, inputs: Sequence[object], **named: Any) -> Any:
        """Split a joint graph as torch does if that is within the budget, otherwise into the fastest that is."""
        split, exact = _split(joint, inputs, named, 1.0, "dp")
        memory = read_budget(self.memory, exact.peak)
        found = [(split, exact)]
        for segments in (True, False):
            if min(each.peak for _, each in found) > memory:
                solver = KnapsackSolver(max(memory, 1), segments=segments)
                found.append(_split(joint, inputs, named, _ASKED, solver))
                if solver.is_fastest:  # then what torch does before it asks may do
                    found.append(_split(joint, inputs, named, 1 - _ASKED, "dp"))
        within = [each for each in found if each[1].peak <= memory]
        split, best = min(within or found, key=lambda each: each[1].work if within else each[1].peak)
        if best.peak > memory and self.memory != LEAST:
            raise BudgetError(
                f"No partition of this graph fits into memory={shown_budget(self.memory, exact.peak)}: it needs at "
                f"least {shown_least(best.peak, exact.peak)}. rmm_linear.fit() compresses and offloads too."
            )
        self.graphs.append((exact, best))
        _logger.info(
            "Graph %d has a peak of %s, %s without a budget, and an estimated %.2f times the work.",
            len(self.graphs), show_bytes(best.peak), show_bytes(exact.peak), best.work / max(exact.work, 1),
        )  # fmt: skip
        if len(self.graphs) == 2:
            _logger.warning(
                "A second training graph is compiled, and each has the budget for itself. If they are of one model, "
                "because of a graph break, their step may need more: rmm_linear.fit() plans the whole model."
            )
        return split

    def uuid(self) -> str:
        """Name a new entry of the cache: what is found in it is not partitioned, so neither judged nor reported."""
        return uuid4().hex


def _split(
    joint: fx.GraphModule, inputs: Sequence[object], named: dict[str, Any], share: float, solver: Any
) -> tuple[Any, Partition]:
    """Let torch split a copy of a joint graph, and judge it."""
    from torch._functorch import config

    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in joint.graph.nodes:  # with their metadata, also the output's
        copies[node] = graph.node_copy(node, copies.__getitem__)
    _pin(graph)
    copied = fx.GraphModule(joint, graph)
    with config.patch(activation_memory_budget=share, activation_memory_budget_solver=solver):
        found = _partitioners().min_cut_rematerialization_partition(copied, inputs, **named)
    return found, Partition.of(found[0].graph, found[1].graph, named["num_fwd_outputs"])


@contextmanager
def compile_budget(memory: int | float | str) -> Iterator[CompileBudget]:
    """Keep what torch.compile compiles inside of a ``with`` block within a memory budget.

    Models are compiled by their first step, so that has to be inside; later steps need not be. Results and gradients
    are those of torch.compile. The budget is of each graph: :func:`rmm_linear.fit` plans models that break.

    Args:
        memory: For what a step makes, parameters and the batch not counted: bytes, a text such as "8GB", a share of
            the peak without a budget such as 0.6 or "60%", or "least".

    Yields:
        What was found, graph by graph.

    Raises:
        BudgetError: By the first step, inside of torch's own error, if no partition fits; it says what is needed.
        RuntimeError: If this version of PyTorch takes no partitioners of others.
        ValueError: If ``memory`` is no budget.

    Example:
        >>> model = torch.compile(torch.nn.Linear(8, 8))
        >>> with compile_budget("1MB"):
        ...     model(torch.ones(2, 8)).sum().backward()  # doctest: +SKIP
    """
    from torch._inductor import config

    made = CompileBudget(memory)
    with config.patch(custom_partitioner_fn=made):
        yield made
    if not made.graphs:
        _logger.warning(
            "compile_budget(%r) had no effect: nothing that trains was compiled inside. Run its first step there, "
            'with the backend "inductor"; torch.compiler.reset() forgets what is compiled already.',
            memory,
        )


def _partitioners() -> Any:
    from torch._functorch import partitioners

    return partitioners


def _extends(name: str, extension: Any) -> None:
    """Let torch take an extension for one of its class of that name, which is slow to import."""
    try:
        from torch._inductor import custom_graph_pass

        getattr(custom_graph_pass, name).register(extension)
    except (ImportError, AttributeError):
        raise RuntimeError(
            f"Budgets for torch.compile extend torch's {name}, which PyTorch {torch.__version__} does not have. "
            "planning.backend() needs no such class, or install a newer PyTorch."
        ) from None


def _hash(memory: object) -> str:
    return hashlib.sha256(Path(__file__).read_bytes() + repr(memory).encode()).hexdigest()

"""Record what every node of a captured graph makes, saves and costs, in one forward pass on fake tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rmm_linear.memory.peak import has_bytes, storages
from rmm_linear.planning.graphs.costs import GraphCosts
from rmm_linear.planning.step.flops import flop_counter

_PURE = ("_operator", "operator", "builtins", "math")  # modules whose functions change nothing


def graph_costs(graph: fx.GraphModule, inputs: Sequence[Any]) -> GraphCosts:
    """Run a graph on fake tensors, node by node."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [fake_input(mode, each) for each in inputs]
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    costs = GraphCosts(graph, fakes, mode, nodes)
    runner = _Runner(costs)
    with mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(runner.pack, lambda tensor: tensor):
        output = runner.run(*fakes)
    for storage in storages(output):
        if storage._cdata in costs.made:
            costs.last[storage._cdata] = costs.count
    runner.finish()
    return costs


def fake_input(mode: FakeTensorMode, each: Any) -> Any:
    if not isinstance(each, Tensor):
        return each
    with mode:
        made = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
    if isinstance(each, nn.Parameter):
        return nn.Parameter(made, requires_grad=each.requires_grad)
    return made.requires_grad_(each.requires_grad)


class _Watched(TorchDispatchMode):
    """Notes whether random numbers are drawn or tensors joined, and which storages are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = self.joins = False
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.drawn |= torch.Tag.nondeterministic_seeded in func.tags
        self.joins |= func is torch.ops.aten.cat.default
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            is_statistic = argument.name in ("running_mean", "running_var") and bool(given.get("training"))
            if is_written or is_statistic:  # norms do not say so in their schemas
                self.written |= {storage._cdata for storage in storages(given.get(argument.name))}
        return func(*args, **kwargs)


class _Runner(fx.Interpreter):
    """Interprets a graph and fills in its costs."""

    def __init__(self, costs: GraphCosts) -> None:
        super().__init__(costs.graph, garbage_collect_values=False)
        self.costs = costs
        self.index = {node: place for place, node in enumerate(costs.nodes)}
        self.current: int | None = None
        self.held: list[Any] = []  # a storage's key is of one that is alive
        self.is_meta = any(isinstance(each, Tensor) and each.is_meta for each in costs.inputs)  # stands for a real one
        self.outer = {storage._cdata: storage.nbytes() for storage in storages(costs.inputs)}
        self.trained = {s._cdata for each in costs.inputs if isinstance(each, nn.Parameter) for s in storages([each])}
        self.users: dict[int, set[int]] = defaultdict(set)
        self.open: dict[str, list[int]] = defaultdict(list)  # regions that have begun
        self.names: dict[int, set[str]] = defaultdict(set)  # storage to inputs
        placeholders = [node for node in costs.graph.graph.nodes if node.op == "placeholder"]
        for node, given in zip(placeholders, costs.inputs, strict=True):
            for storage in storages(given):
                self.names[storage._cdata].add(node.name)

    def pack(self, tensor: Tensor) -> Tensor:
        if self.current is not None:
            self.held.append(tensor)
            storage = tensor.untyped_storage()
            if storage._cdata not in self.outer:
                self._make(tensor, self.current)
                self.costs.saved[self.current].add(storage._cdata)
        return tensor.detach()  # as no backward pass frees the graph: an output would hold the node that saves it

    def _make(self, tensor: Tensor, place: int) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes() if self.is_meta or has_bytes(tensor) else 0
        self.costs.made.setdefault(storage._cdata, place)
        self.costs.size.setdefault(storage._cdata, size)

    def run_node(self, n: fx.Node) -> Any:
        place = self.index.get(n)
        if place is None:
            return super().run_node(n)
        costs, given = self.costs, [self.env[each] for each in n.all_input_nodes]
        inputs = {storage._cdata: storage for storage in storages(given)}
        costs.saved.append(set())
        self.current = place
        with flop_counter() as counter, _Watched() as watched:
            output = super().run_node(n)
        self.current = None
        self.held.append(output)
        costs.flops.append(counter.get_total_flops())
        costs.random.append(watched.drawn)
        costs.joining |= {place} if watched.joins else set()
        costs.read.append(set(inputs) - set(self.outer))
        touched = sum(storage.nbytes() for storage in inputs.values())
        for key in inputs:
            self.users[key].add(place)
            if key in self.trained:
                costs.parameters[key] = (place, self.outer[key])
        for leaf in tree_leaves(output):
            for storage in storages([leaf]):
                if storage._cdata in self.outer:
                    continue
                touched += 0 if storage._cdata in costs.made else storage.nbytes()
                self._make(leaf, place)
                if leaf.requires_grad:
                    costs.differentiable.add(storage._cdata)
        costs.touched.append(touched)
        costs.touches.append({*inputs, *(storage._cdata for storage in storages(output))})
        for key in watched.written & set(inputs):
            costs.writing.add(place)
            costs.changed[key] = place
            costs.written |= self.names.get(key, set())
        self._note_effects(n, place, has_tensors=any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)))
        return output

    def _note_effects(self, node: fx.Node, place: int, *, has_tensors: bool) -> None:
        """Nodes that only switch something; what is between two switches is a region."""
        module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
        if has_tensors or node.op == "call_method" or module in _PURE:
            return
        self.costs.effects.add(place)
        kind, opens = name, bool(name)
        if name in ("_enter_autocast", "_exit_autocast"):
            kind, opens = "autocast", name == "_enter_autocast"
        elif "set_grad_enabled" in name:
            kind, opens = "gradients", not node.args[0]
        elif name == "_sdpa_kernel":
            opens = not self.open[name]
        else:
            return
        if opens:
            self.open[kind].append(place)
        elif self.open[kind]:
            self.costs.whole.append(set(range(self.open[kind].pop(), place + 1)))

    def finish(self) -> None:
        costs = self.costs
        costs.whole += [set(range(place, costs.count)) for places in self.open.values() for place in places]
        direct = {node.name for node in costs.graph.graph.nodes if node.op == "placeholder"}
        for key in costs.changed.keys() & set(self.outer):  # pieces put inputs back, but only those they get themselves
            given = {each for place in self.users[key] for each in costs.nodes[place].all_input_nodes}
            holding = {each.name for each in given if key in {s._cdata for s in storages(self.env.get(each))}}
            if holding - direct:
                costs.whole.append(self.users[key])
        costs.groups += costs.whole
        for key, place in costs.made.items():
            costs.last.setdefault(key, max(self.users[key], default=place))
            until = costs.changed.get(key)
            if until is not None and until > place:
                costs.groups.append({place, *(user for user in self.users[key] if user <= until)})
        for place in range(costs.count - 1, -1, -1):
            costs.saver.update(dict.fromkeys(costs.saved[place], place))
        needed = self._needed()
        costs.differentiable = {key for key in costs.differentiable if costs.nodes[costs.made[key]] in needed}

    def _needed(self) -> set[fx.Node]:
        found, todo = set[fx.Node](), [node for node in self.costs.graph.graph.nodes if node.op == "output"]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return found

"""The costs of every node of a captured graph: what it makes and saves, and its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

# Rough speeds of one core and of its memory: only their ratio matters, to compare products with other operators.
_FLOPS, _BYTES = 40e9, 8e9


@dataclass
class GraphCosts:
    """The nodes of a graph in the order of execution, and the storages that they make."""

    graph: fx.GraphModule
    inputs: list[Any]  # fake tensors in the place of its inputs
    mode: FakeTensorMode
    nodes: list[fx.Node]
    made: dict[int, int] = field(default_factory=dict)  # storage to the node that makes it
    size: dict[int, int] = field(default_factory=dict)
    # Storage to the last node that uses it; the number of nodes if it is an output
    last: dict[int, int] = field(default_factory=dict)
    saver: dict[int, int] = field(default_factory=dict)  # storage to the first node that saves it for the backward pass
    differentiable: set[int] = field(default_factory=set)  # storages that have a gradient
    saved: list[set[int]] = field(default_factory=list)  # by node: the storages that it saves
    read: list[set[int]] = field(default_factory=list)  # by node: the storages that it reads
    # Parameter's storage to its last node and bytes
    parameters: dict[int, tuple[int, int]] = field(default_factory=dict)
    flops: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)  # by node: bytes read and written
    random: list[bool] = field(default_factory=list)  # by node: whether it draws random numbers
    changed: dict[int, int] = field(default_factory=dict)  # storage to the last node that changes it in place
    # By node: the storages that it reads, makes or changes, those of inputs among them
    touches: list[set[int]] = field(default_factory=list)
    # Groups of nodes that must stay in one piece: they switch gradients, autocast or kernels, or change an input that
    # others see through a view
    whole: list[set[int]] = field(default_factory=list)
    # These, and nodes between two of which a recomputed piece must not begin: one of them changes in place what another
    # made
    groups: list[set[int]] = field(default_factory=list)
    # Nodes that concatenate: the gradients of what they read are parts of one storage
    joining: set[int] = field(default_factory=set)
    # Nodes that change something in place, norms with their statistics among them
    writing: set[int] = field(default_factory=set)
    written: set[str] = field(default_factory=set)  # names of inputs that a node changes
    # Nodes that only have an effect, as those that switch autocast: none may change places with them
    effects: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        return len(self.nodes)

    @property
    def seconds(self) -> list[float]:
        """By node: a rough time."""
        return [flops / _FLOPS + touched / _BYTES for flops, touched in zip(self.flops, self.touched, strict=True)]

    def made_by(self) -> list[set[int]]:
        """Return by node: the storages that it makes."""
        found: list[set[int]] = [set() for _ in self.nodes]
        for key, place in self.made.items():
            found[place].add(key)
        return found

    def reordered(self, order: Sequence[int]) -> GraphCosts:
        if all(place == node for place, node in enumerate(order)):
            return self
        place_of = {node: place for place, node in enumerate(order)}
        last: dict[int, int] = {}
        for place, node in enumerate(order):
            last.update(dict.fromkeys(self.read[node], place))
        saver: dict[int, int] = {}
        for place, node in reversed([*enumerate(order)]):
            saver.update(dict.fromkeys(self.saved[node], place))
        made = {key: place_of[node] for key, node in self.made.items()}
        return replace(
            self,
            nodes=[self.nodes[node] for node in order],
            made=made,
            last={
                key: self.count if node == self.count else max(last.get(key, 0), made[key])
                for key, node in self.last.items()
            },
            saver=saver,
            saved=[self.saved[node] for node in order],
            read=[self.read[node] for node in order],
            parameters={key: (place_of[node], size) for key, (node, size) in self.parameters.items()},
            flops=[self.flops[node] for node in order],
            touched=[self.touched[node] for node in order],
            random=[self.random[node] for node in order],
            changed={key: place_of[node] for key, node in self.changed.items()},
            groups=[{place_of[node] for node in group} for group in self.groups],
            joining={place_of[node] for node in self.joining},
            writing={place_of[node] for node in self.writing},
            touches=[self.touches[node] for node in order],
            whole=[{place_of[node] for node in group} for group in self.whole],
            effects={place_of[node] for node in self.effects},
        )

    def sources(self) -> list[set[int]]:
        """Return by node: those that it reads from, through views too."""
        place_of = {node: place for place, node in enumerate(self.nodes)}
        found = [{place_of[each] for each in node.all_input_nodes if each in place_of} for node in self.nodes]
        for place, keys in enumerate(self.touches):
            found[place] |= {self.made[key] for key in keys if self.made.get(key, place) < place}
        return found

    def before(self) -> list[set[int]]:
        """Return by node: those that must come before it in any order.

        They are what it reads, what changes or reads what it changes, random nodes, nodes with effects, and the other
        readers of what three or more read, whose gradients would add up in another order.
        """
        found = self.sources()
        users: dict[int, list[int]] = {}
        for place, keys in enumerate(self.touches):
            for key in keys:
                users.setdefault(key, []).append(place)
        trained = self.differentiable | self.parameters.keys()
        chains = [places for key, places in users.items() if key in self.changed]
        chains += [places for key, places in users.items() if key in trained and len(places) - (key in self.made) > 2]
        chains.append([place for place, drawn in enumerate(self.random) if drawn])
        for chain in chains:
            for first, second in pairwise(chain):
                found[second].add(first)
        last = -1
        for place in range(self.count):
            if place in self.effects:
                found[place] |= set(range(place))
                last = place
            elif last >= 0:
                found[place].add(last)
        return found

    def legal_cuts(self) -> list[int]:
        """Return the numbers of nodes before which the graph may be cut, whichever pieces are recomputed."""
        return self._outside(self.groups)

    def possible_cuts(self) -> list[int]:
        """Return the numbers of nodes before which it may be cut if :meth:`repeatable` says which are recomputed."""
        return self._outside(self.whole)

    def repeatable(self, begin: int) -> int:
        """Return where a piece must end at the latest so that it can be recomputed.

        A recomputed piece must not read what other nodes made, and changed in place after it began: a convolution's
        output, say, which the ReLU that the piece begins with overwrites.
        """
        spoiled = {key for key, place in self.changed.items() if self.made.get(key, begin) < begin <= place}
        if not spoiled:
            return self.count
        return next((place for place in range(begin, self.count) if self.read[place] & spoiled), self.count)

    def _outside(self, groups: Sequence[set[int]]) -> list[int]:
        inside = {place for group in groups for place in range(min(group) + 1, max(group) + 1)}
        return [place for place in range(1, self.count) if place not in inside]

"""Find the position-wise modules of a model that are worth running in slices, by what they compute.

These are norms, experts, and modules with several linear layers inside: dense and gated MLPs, projections with
adapters. A linear layer, an embedding or an activation alone makes its output and no more, so slices save nothing. Of
modules inside of one another, the outermost is found. What a layer runs in a method of its own, as BERT's layers do
with their MLP, is found by the method's name, and tried like a module.

Norms are known by :func:`~rmm_linear.activations.norm_form.norm_of`, experts by the registry of transformers that they
use; all others are tried (:mod:`trial`), from the inside to the outside: what mixes positions is not tried again in
the modules around it. Modules that are alike are tried once.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rmm_linear.activations.experts import PackedExperts, is_experts
from rmm_linear.activations.norm_form import NormForm, norm_of
from rmm_linear.planning.tiles.trial import Verdict, try_module

METHODS = ("feed_forward_chunk", "_ff_block")  # of transformers' layers, and of torch's
_LEAST = 2  # linear layers
_MANY = 1000  # entries of a container that are not settings
# Attributes that do not change what a module computes, but for those of all modules: a layer's numbers, and what this
# library or a plan has put there.
_NO_SETTINGS = {"layer_idx", "layer_id", "layer_index", "index", "forward", *vars(nn.Module())}


@dataclass(frozen=True)
class FoundTile:
    """A module, or a method of it, that can run in slices."""

    name: str  # of the module
    method: str = "forward"  # what runs in slices
    parts: tuple[str, ...] | None = None  # names of the children that a method other than forward runs; None for all
    kind: str = ""  # "norm", "experts", or how many linear layers are inside

    @property
    def label(self) -> str:
        """The name, with the method where it is not ``forward``."""
        return self.name if self.method == "forward" else f"{self.name}.{self.method}".lstrip(".")


@dataclass
class FoundTiles:
    """What :func:`find_tiles` has found."""

    tiles: list[FoundTile] = field(default_factory=list)  # in the model's order
    # By its name, why a module whose code runs linear layers cannot run in slices
    refused: dict[str, str] = field(default_factory=dict)


# By the class of a module: what trials have found of modules that are alike.
_KNOWN: weakref.WeakKeyDictionary[type, dict[Hashable, Verdict | str | None]] = weakref.WeakKeyDictionary()


def find_tiles(module: nn.Module) -> FoundTiles:
    """Find what can run in slices, in a model or a part of it, which may be found itself, by the name "".

    The module stays as it is, and so do random generators. Modules without values, or with sharded ones, are judged by
    their operators, of which some are unknown: more is refused then.
    """
    found = _Search(FoundTiles())
    tiles = found.visit("", module).tiles
    order = {name: number for number, (name, _) in enumerate(module.named_modules())}
    found.found.tiles = sorted(tiles, key=lambda tile: order[tile.name])
    return found.found


@dataclass
class _Visited:
    """What is known of a module: what was found inside, and whether it mixes positions or has experts."""

    tiles: list[FoundTile]
    mixes: str = ""
    has_experts: bool = False


@dataclass
class _Search:
    """One search through a model."""

    found: FoundTiles
    seen: dict[nn.Module, _Visited] = field(default_factory=dict)

    def visit(self, name: str, module: nn.Module) -> _Visited:
        """Look at a module, after those inside of it."""
        if module in self.seen:  # by another name
            return _Visited([], self.seen[module].mixes, self.seen[module].has_experts)
        self.seen[module] = visited = self._visit(name, module)
        return visited

    def _visit(self, name: str, module: nn.Module) -> _Visited:
        if isinstance(module, PackedExperts) or is_experts(module):
            if getattr(module, "_is_expert_parallel", False):
                self.found.refused[name] = "its experts are divided among devices"
                return _Visited([], has_experts=True)
            return _Visited([FoundTile(name, kind="experts")], has_experts=True)
        if _is_norm(module):
            return _Visited([FoundTile(name, kind="norm")])
        children = [(child, self.visit(_join(name, key), child)) for key, child in module.named_children()]
        inside = _Visited(
            [tile for _, one in children for tile in one.tiles],
            next((one.mixes for _, one in children if one.mixes), ""),
            any(one.has_experts for _, one in children),
        )
        linears = [part for part in module.modules() if _is_linear(part)]
        if len(linears) < _LEAST or not is_callable(module):
            return inside
        whole = self._whole(name, module, inside, linears)
        if whole is not None:
            return whole
        for method in METHODS:
            verdict = _tried(module, method) if callable(getattr(type(module), method, None)) else None
            if verdict is not None and verdict.reason is None:
                prefixes = tuple(f"{_join(name, part)}." for part in verdict.ran)
                inside.tiles = [one for one in inside.tiles if not f"{one.name}.".startswith(prefixes)]
                count = sum(_is_linear(part) for child in verdict.ran for part in module.get_submodule(child).modules())
                inside.tiles.append(FoundTile(name, method, verdict.ran, f"{count} linear layers"))
        return inside

    def _whole(self, name: str, module: nn.Module, inside: _Visited, linears: list[nn.Module]) -> _Visited | None:
        """Return the module as one tile, or note why it is none."""
        if inside.has_experts:
            return None  # the experts alone: losses of a router read what it returns by hooks
        if any(getattr(part, "rmm_operation", None) == "logits" for part in linears):
            reason = "its logits are made in chunks already"
        elif inside.mixes:
            reason = f"a module inside mixes positions ({inside.mixes})"
        else:
            verdict = _tried(module, "forward")
            if verdict.reason is None:
                return _Visited([FoundTile(name, kind=f"{len(linears)} linear layers")])
            reason = verdict.reason
            inside.mixes = type(module).__name__ if verdict.mixes else ""
        own = [child for child in module.children() if _is_linear(getattr(child, "base_layer", child))]
        if len(own) >= _LEAST:
            self.found.refused[name] = reason
        return None


def _tried(module: nn.Module, method: str) -> Verdict:
    known = _KNOWN.setdefault(type(module), {})
    key = method, _likeness(module)
    found = known.get(key)
    if not isinstance(found, Verdict):
        known[key] = found = try_module(module, method, _widths(module))
    return found


def _is_norm(module: nn.Module) -> bool:
    if getattr(module, "rmm_operation", None) == "norm":
        form: NormForm | None = vars(module)["rmm_norm"]
        return form is not None and form.dims == 1
    if any(True for _ in module.children()) or not any(p.dim() == 1 for p in module.parameters()):
        return False
    replaced = vars(module).get("forward")
    if replaced is not None and not type(replaced).__module__.startswith("rmm_linear."):
        return False
    known = _KNOWN.setdefault(type(module), {})
    key = "norm", _likeness(module)
    if key not in known:
        vars(module).pop("forward", None)  # of a tile or a plan
        try:
            form = norm_of(module)
        finally:
            vars(module).update({} if replaced is None else {"forward": replaced})
        known[key] = "norm" if form is not None and form.dims == 1 else None
    return known[key] is not None


def _likeness(module: nn.Module) -> Hashable:
    """Return what modules have in common whose trials end alike: classes, shapes and settings, but no numbers."""
    return tuple(_parts(module))


class _Same:
    """An object by its identity, for as long as it lives; then it is equal to nothing."""

    def __init__(self, one: Any) -> None:
        self._id = id(one)
        try:
            self._ref: Callable[[], Any] = weakref.ref(one)
        except TypeError:
            self._ref = lambda: None

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ref() is not None and self._ref() is other._ref()


def _setting(value: Any, depth: int = 3) -> Hashable:
    """Return what is equal for equal settings: numbers and texts, also in containers, and other objects themselves."""
    if isinstance(value, int | float | str | bytes | torch.dtype | torch.device | None):
        return type(value), value
    if isinstance(value, dict | list | tuple) and depth and len(value) < _MANY:
        entries = [each for pair in value.items() for each in pair] if isinstance(value, dict) else value
        return type(value), tuple(_setting(one, depth - 1) for one in entries)
    if inspect.ismethod(value) and not isinstance(value.__self__, nn.Module):
        return _Same(value.__func__), _Same(value.__self__)
    return _Same(value.__func__ if inspect.ismethod(value) else value)


def _parts(module: nn.Module) -> Iterator[Hashable]:
    for name, part in module.named_modules():
        own = [
            (key, _setting(value))
            for key, value in sorted(vars(part).items())
            if key not in _NO_SETTINGS and not key.startswith(("rmm_", "_hf_"))
        ]
        tensors = [
            (key, tuple(one.shape), str(one.dtype), one.device.type, type(one).__name__)
            for key, one in (*part._parameters.items(), *part._buffers.items())
            if one is not None
        ]
        yield name, type(part), tuple(own), tuple(tensors)


def is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_linear(module: nn.Module) -> bool:
    """Say whether a module is a linear layer of any class, quantized ones too."""
    if isinstance(module, nn.Linear):
        return True
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) or any(True for _ in module.children()):
        return False
    weight = module._parameters.get("weight")
    return (weight is not None and weight.dim() == 2) or hasattr(module, "in_features")


def _widths(module: nn.Module) -> list[int]:
    """Return the widths of the inputs of a module's linear layers and norms, in their order, each once."""
    found: list[int] = []
    for part in module.modules():
        weight = part._parameters.get("weight")
        if isinstance(getattr(part, "in_features", None), int):
            found.append(part.in_features)  # pyright: ignore
        elif _is_linear(part) and weight is not None:
            found += [*weight.shape[:: 1 if hasattr(part, "nf") else -1]]  # Conv1D has its weight the other way round
        elif weight is not None and weight.dim() == 1:
            found.append(len(weight))
    return [*dict.fromkeys(found)]


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child

"""Find the blocks of a model: its outermost repeated modules, and the modules before, between and after them.

Repeated are the entries of a list, and children of one class that a module has three or more of, as GoogLeNet has
inceptions; an encoder and a decoder of one class are no blocks. Lists in lists are divided to the innermost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from rmm_linear.planning.tiles.find import is_callable


def find_blocks(model: nn.Module) -> list[str]:
    """Name the blocks of a model in its order: repeated modules, and the other modules.

    A model without them has its children as blocks, and those of a plain ``nn.Sequential`` one by one.
    """
    if _repeats(model):
        return _split("", model)
    is_shared = len(model._modules) > len([*model.children()])  # one that is called again is a block by itself
    divided = _callable if is_shared else _links
    return [name for child, module in model.named_children() for name in divided(child, module)]


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the blocks that are entries of a list of like modules; all blocks, if there is no such list."""
    blocks = find_blocks(model)
    kinds = {block: _kind(model, block) for block in blocks}
    counts = Counter(kinds.values())
    repeated = [block for block in blocks if kinds[block] is not None and counts[kinds[block]] > 1]
    return repeated or blocks


def _kind(model: nn.Module, block: str) -> tuple[str, type[nn.Module]] | None:
    parent, module = block.rpartition(".")[0], model.get_submodule(block)
    listed = isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential | nn.ModuleDict)
    return (parent, type(module)) if listed and any(module.children()) else None


def find_inner(model: nn.Module, block: str) -> tuple[str, ...]:
    """Find the parts of a block that may be recomputed by themselves while it is recomputed."""
    module = model.get_submodule(block)
    first_names = {name for name, _ in model.named_modules()}  # not those of modules that are shared
    children = [
        (f"{block}.{name}", child) for name, child in module.named_children() if f"{block}.{name}" in first_names
    ]
    if len(children) == 1:
        return find_inner(model, children[0][0])
    return tuple(name for name, child in children if is_callable(child) and any(child.children()))


def owner_of(name: str, blocks: Iterable[str]) -> str | None:
    return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)


def alike(model: nn.Module, name: str) -> str:
    """Return what modules that cost the same have in common, the input aside."""
    module = model.get_submodule(name)
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    return f"{type(module).__qualname__} {shapes}"


def _callable(name: str, module: nn.Module) -> list[str]:
    if is_callable(module):
        return [name]
    return [found for child, inner in module.named_children() for found in _callable(f"{name}.{child}", inner)]


def _links(name: str, module: nn.Module) -> list[str]:
    """Return the modules of a chain, of which none has several like ones."""
    if type(module) is not nn.Sequential:
        return _callable(name, module)
    return [found for child, inner in module.named_children() for found in _links(f"{name}.{child}", inner)]


_LISTS = nn.ModuleList, nn.Sequential, nn.ModuleDict
_MANY = 3  # children of one class that are blocks, where no list has them


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Return the classes that a list has several entries of, or a module many children of."""
    least = 2 if isinstance(module, _LISTS) else _MANY
    kinds = Counter(type(child) for child in module.children() if is_callable(child) and any(child.children()))
    return {kind for kind, count in kinds.items() if count >= least}


def _repeats(module: nn.Module) -> bool:
    return any(_repeated(inner) for inner in module.modules())


def _split(name: str, module: nn.Module) -> list[str]:
    if not _repeats(module):
        return _callable(name, module)
    found: list[str] = []
    for child, inner in module.named_children():
        path = f"{name}.{child}" if name else child
        is_block = type(inner) in _repeated(module) and not (isinstance(inner, _LISTS) and _repeated(inner))
        found += [path] if is_block else _split(path, inner)
    return found

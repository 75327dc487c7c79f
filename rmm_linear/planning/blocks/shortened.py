"""Simulate a few of many like blocks: what one of them takes, all do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from rmm_linear.planning.blocks.find import alike

# The first ones may save what others share, and have offloaded copies on the device; the last one what follows reads.
_FIRST, _LAST = 4, 1


def leave_out(model: nn.Module, rows: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Map blocks that need not run to one that stands for them.

    ``rows``: Name and option of every block. Blocks stand for each other that are neighbours in a list, of one class
    with parameters of one shape, and have one option.
    """
    found: dict[str, str] = {}
    group = list[str]()
    last: tuple[str, ...] = ()
    for name, option in (*rows, ("", "")):
        parent, _, child = name.rpartition(".")
        is_listed = child.isdigit() and isinstance(model.get_submodule(parent), nn.ModuleList)
        kind = (parent, option, alike(model, name)) if is_listed else (name,)
        if kind != last:
            found |= dict.fromkeys(group[_FIRST:-_LAST], group[_FIRST - 1]) if len(group) > _FIRST + _LAST else {}
            group, last = [], kind
        group.append(name)
    return found


def later_gradients(
    model: nn.Module, names: Sequence[str], standing: Mapping[str, str], held: Callable[[Tensor], int] | None
) -> dict[str, int]:
    """Return the bytes of gradients in a block's backward pass that were not there where some blocks were left out."""
    count = held or (lambda parameter: parameter.numel() * parameter.itemsize)
    found, later = dict[str, int](), 0
    for name in reversed(names):
        found[name] = later
        if name in standing:
            later += sum(
                count(parameter) for parameter in model.get_submodule(name).parameters() if parameter.requires_grad
            )
    return found


@contextmanager
def without(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Take entries out of their lists inside of the block."""
    with ExitStack() as stack:
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
            modules = model.get_submodule(parent)._modules
            stack.callback(_put_back, modules, dict(modules))
        for name in names:
            parent, _, child = name.rpartition(".")
            del model.get_submodule(parent)._modules[child]
        yield


def _put_back(modules: dict[str, nn.Module | None], before: dict[str, nn.Module | None]) -> None:
    modules.clear()
    modules.update(before)

"""Run a chain of modules by a plan: segments between saved outputs are computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rmm_linear.planning.chains.subsets import ChainPlan
from rmm_linear.planning.replay.buffers import buffers_kept, parts_of
from rmm_linear.planning.replay.replayed import Replayed


def chain_sizes(modules: Iterable[nn.Module], input: Any) -> list[int]:
    """Measure the outputs of a chain by one run without gradients.

    Args:
        modules: An ``nn.Sequential`` or a list of modules; each takes what the one before it returns.
        input: What the first one takes.

    Returns:
        Bytes of the input and of every module's output: one more than there are modules. An output that is its input,
        or a view of it, counts as 0. Random numbers and buffers are afterwards as they were.
    """
    chain = _chain(modules)
    tensors = [leaf for leaf in tree_leaves(input) if isinstance(leaf, Tensor)]
    devices = sorted({leaf.device.index for leaf in tensors if leaf.device.type == "cuda"})
    sizes, before = [_bytes(input, set())], _storages(input)
    with torch.random.fork_rng(devices=devices), buffers_kept(parts_of(chain)), torch.no_grad():
        for module in chain:
            input = module(input)
            sizes.append(_bytes(input, before))
            before = _storages(input)
    return sizes


def checkpoint_chain(modules: Iterable[nn.Module], input: Any, plan: ChainPlan) -> Any:
    """Run a chain of modules and save the outputs that a plan names; the others are computed again for the gradients.

    The result and the gradients are those of running one module after the other, to the bit; dropout draws the same
    numbers again, and buffers are updated once: a repetition reads what the first run read. Nothing of the last segment
    is computed again, for its backward pass comes first. Without gradients, the modules run and nothing is saved.

    A module counts as one that needs its input or its output for its gradient, as linear layers, convolutions and
    activations do. A module that saves more inside of it, such as a block of a transformer, needs more than the plan
    says; give its layers as modules.

    Args:
        modules: An ``nn.Sequential`` or a list of modules; each takes what the one before it returns.
        input: What the first one takes.
        plan: A plan for one size more than there are modules, the input's first: see :func:`chain_sizes`.

    Returns:
        The result of the last module.

    Raises:
        ValueError: If the plan is one of a longer or shorter chain, or modules that run twice change what they begin
            with in place.

    Example:
        >>> chain = nn.Sequential(*(nn.Tanh() for _ in range(15)))
        >>> x = torch.ones(4, requires_grad=True)
        >>> from rmm_linear.planning import minimum_peak
        >>> plan = minimum_peak(chain_sizes(chain, x))
        >>> checkpoint_chain(chain, x, plan).sum().backward()
        >>> print(plan)
        peak of 112 bytes, saves 6 of 16 outputs: 0, 5, 9, 12, 14, 15
    """
    chain = _chain(modules)
    if plan.kept[-1] != len(chain):
        raise ValueError(
            f"The plan must be one of {len(chain) + 1} sizes, the input's and those of {len(chain)} modules' outputs, "
            f"got one of {plan.kept[-1] + 1}. Use minimum_peak(chain_sizes(modules, input))."
        )
    for first, end in pairwise(plan.kept):
        segment = chain[first:end]
        if len(segment) == 1 or end == len(chain) or not torch.is_grad_enabled():
            input = _run(segment, input)
        else:
            contexts = functools.partial(_contexts, segment, tree_leaves(input))
            input = checkpoint(_run, segment, input, use_reentrant=False, context_fn=contexts)
    return input


def _run(segment: Sequence[nn.Module], input: Any) -> Any:
    for module in segment:
        input = module(input)
    return input


def _contexts(
    segment: Sequence[nn.Module], leaves: Sequence[Any]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    replayed = Replayed(segment, leaves)
    return _unwritten(segment, replayed), replayed.again(replayed.seen())


@contextmanager
def _unwritten(segment: Sequence[nn.Module], replayed: Replayed) -> Iterator[None]:
    """Raise if a segment changes what it begins with, which its repetition needs."""
    yield
    try:
        replayed.check()
    except RuntimeError:
        names = ", ".join(type(module).__name__ for module in segment)
        raise ValueError(
            f"Modules between two saved outputs must leave their input as it was, got {names}, which changed it in "
            "place: they run on it once more. Use inplace=False, or plans that save the changed output too."
        ) from None


def _chain(modules: Iterable[nn.Module]) -> list[nn.Module]:
    chain = list(modules)
    if not chain:
        raise ValueError("modules must name at least one module, got none.")
    return chain


def _storages(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _bytes(tree: Any, known: set[int]) -> int:
    """Return the bytes of the storages of a tree's tensors, each once, but for those that are known."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    found = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in tensors}
    return sum(size for address, size in found.items() if address not in known)

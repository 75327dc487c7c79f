"""Measure memory that operators take and free while they run, which only the allocator sees."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from rmm_linear.planning.step.step import as_in_training, copied, run_step

Shapes = tuple[tuple[int, ...], ...]
Workspace = Mapping[tuple[str, Shapes], int]
"""An operator's name, as "aten::convolution", and the shapes of its tensors that are no scalars, to bytes."""
_MEMORY = "[memory]"


def workspace(model: nn.Module, example: Any) -> Workspace:
    """Measure the bytes that operators take beyond their results, by profiling one step on the real tensors.

    Convolutions rearrange what they are given, for example. Peaks that :func:`rmm_linear.planning.simulate` predicts
    leave this out unless it is told.

    Args:
        model: The model; it stays as it is, as do its gradients and random numbers.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`.

    Returns:
        Operator's name and shapes of its tensors to bytes, where there are any.
    """
    is_cuda = any(tensor.is_cuda for tensor in model.parameters())
    with as_in_training(model):
        batch = copied(example)
        entries = allocations(lambda: run_step(model, batch), is_cuda=is_cuda)
    threads: dict[Any, list[dict[str, Any]]] = {}
    for entry in entries:
        threads.setdefault(entry["tid"], []).append(entry)
    found: dict[tuple[str, Shapes], int] = {}
    for each in threads.values():
        for key, size in _beyond_results(each):
            found[key] = max(found.get(key, 0), size)
    return found


def allocator_peak(run: Callable[[], Any], *, is_cuda: bool = False) -> int:
    """Return how far PyTorch's allocator rises above where it began."""
    changes = (entry["args"]["Bytes"] for entry in allocations(run, is_cuda=is_cuda) if entry["name"] == _MEMORY)
    return max(accumulate(changes, initial=0))


def allocations(run: Callable[[], Any], *, is_cuda: bool = False) -> list[dict[str, Any]]:
    """Run a function under PyTorch's profiler: operators and allocations, as in a Chrome trace, by time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, profile_memory=True, record_shapes=True) as profiler:
        run()
        if is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]

    def is_meant(entry: dict[str, Any]) -> bool:
        is_memory = entry.get("name") == _MEMORY and (entry["args"]["Device Type"] != 0) == is_cuda
        return is_memory or entry.get("cat") == "cpu_op"

    # At one time, an operator comes before what it allocates.
    return sorted(filter(is_meant, entries), key=lambda entry: (entry["ts"], entry["name"] == _MEMORY))


def key_of(func: Any, args: Any, kwargs: Any) -> tuple[str, Shapes]:
    shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    return func._schema.name, shapes


def _beyond_results(entries: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[str, Shapes], int]]:
    """Go through the operators of a thread as they end, with what they took beyond what they left."""
    running: list[tuple[dict[str, Any], int]] = []  # operators, and the highest level inside of them
    now = 0

    def ended(until: float) -> Iterator[tuple[tuple[str, Shapes], int]]:
        while running and running[-1][0]["ts"] + running[-1][0]["dur"] < until:
            entry, highest = running.pop()
            if running:
                running[-1] = running[-1][0], max(running[-1][1], highest)
            if highest > now and "::" in entry["name"] and not entry["name"].startswith("autograd::"):
                yield (entry["name"], tuple(_shapes(entry["args"].get("Input Dims", ())))), highest - now

    for entry in entries:
        yield from ended(entry["ts"])
        if entry["name"] == _MEMORY:
            now += entry["args"]["Bytes"]
            if running:
                running[-1] = running[-1][0], max(running[-1][1], now)
        else:
            running.append((entry, now))
    yield from ended(float("inf"))


def _shapes(dims: Iterable[Any]) -> Iterator[tuple[int, ...]]:
    for each in dims:
        if each and isinstance(each[0], int):
            yield tuple(each)
        elif each:
            yield from _shapes(each)

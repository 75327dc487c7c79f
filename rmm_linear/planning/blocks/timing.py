"""Time the forward passes of modules, on the real tensors but without saving any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.planning.blocks.find import alike
from rmm_linear.planning.step.clock import Clock
from rmm_linear.planning.step.flops import PRODUCTS


def time_modules(model: nn.Module, example: Any, names: Sequence[str], repeats: int = 2) -> dict[str, float]:
    """Return seconds of modules' forward passes by name; like modules have the same, so that noise does not choose."""
    passes = [Clock(model, names).run(model, example) for _ in range(repeats)]
    return _mean_of_alike(model, {name: min(seconds[name] for seconds in passes) for name in names})


def cheap_shares(model: nn.Module, example: Any, names: Sequence[str]) -> dict[str, float]:
    """Measure the share of modules' time that is not spent in products, which selective recomputation saves."""
    clock = Clock(model, names)
    with _Operators(clock) as operators:
        clock.run(model, example)
    products, others = clock.sums(operators.products), clock.sums(operators.others)
    shares = {name: others[name] / max(others[name] + products[name], 1e-12) for name in names}
    return _mean_of_alike(model, shares)


def _mean_of_alike(model: nn.Module, values: dict[str, float]) -> dict[str, float]:
    kinds = {name: alike(model, name) for name in values}
    groups: dict[str, list[float]] = {}
    for name, value in values.items():
        groups.setdefault(kinds[name], []).append(value)
    return {name: sum(groups[kind]) / len(groups[kind]) for name, kind in kinds.items()}


class _Operators(TorchDispatchMode):
    """Times operators, products apart from others."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.products: list[tuple[str, Any, Any]] = []
        self.others: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = self.clock.now()
        output = func(*args, **(kwargs or {}))
        if self.clock.running:
            spans = self.products if func._overloadpacket in PRODUCTS else self.others
            spans.append((self.clock.running[-1][0], begin, self.clock.now()))
        return output

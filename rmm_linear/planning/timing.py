"""How long the forward passes of modules take, on the real tensors but without saving any."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rmm_linear.memory.inputs import call_with
from rmm_linear.planning.blocks import alike
from rmm_linear.planning.recompute import PRODUCTS
from rmm_linear.planning.step import as_in_training, copied


def time_modules(model: nn.Module, example: Any, names: Sequence[str], repeats: int = 2) -> dict[str, float]:
    """Measure how long the forward passes of modules take.

    Like modules have the same time, so that noise does not choose between them.

    Args:
        model: The model.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`.
        names: Names of modules.
        repeats: Passes; the least time counts.

    Returns:
        Name to seconds: of the device for CUDA, of the process for the CPU.
    """
    passes = [Clock(model, names).run(model, example) for _ in range(repeats)]
    return _mean_of_alike(model, {name: min(seconds[name] for seconds in passes) for name in names})


def cheap_shares(model: nn.Module, example: Any, names: Sequence[str]) -> dict[str, float]:
    """Measure the share of modules' time that is not spent in products, which selective recomputation keeps.

    Args:
        model: The model.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`.
        names: Names of modules, none inside of another.

    Returns:
        Name to a share of the time in operators.
    """
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


class Clock:
    """Reads the time when modules, or whatever has a name, begin and end."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Begin without spans.

        Args:
            model: The model, whose device's time is read.
            names: Of its modules.
        """
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.names = names
        self.running: list[tuple[str, Any]] = []
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """Return the time: seconds of the process, or an event of CUDA."""
        if self.device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def run(self, model: nn.Module, example: Any) -> dict[str, float]:
        """Run a forward pass.

        Args:
            model: The model.
            example: A training batch.

        Returns:
            Name to seconds.
        """

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self.running.append((name, self.now()))

        def leave(*_: Any) -> None:
            name, begin = self.running.pop()
            self.spans.append((name, begin, self.now()))

        with as_in_training(model), torch.no_grad(), ExitStack() as stack:
            for name in self.names:
                module = model.get_submodule(name)
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            call_with(model, copied(example))
        return self.sums(self.spans)

    def sums(self, spans: Sequence[tuple[str, Any, Any]]) -> dict[str, float]:
        """Add up the time between what :meth:`now` returned.

        Args:
            spans: Name, begin and end.

        Returns:
            Name to seconds.
        """
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self.device)
        seconds = dict.fromkeys(self.names, 0.0)
        for name, begin, end in spans:
            seconds[name] += begin.elapsed_time(end) / 1000 if is_cuda else end - begin
        return seconds


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

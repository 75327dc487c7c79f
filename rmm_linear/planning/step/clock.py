"""Read the time when modules, or whatever has a name, begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from rmm_linear.memory.inputs import call_with
from rmm_linear.planning.step.step import as_in_training, copied


class Clock:
    """Reads the time when modules, or whatever has a name, begin and end."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
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
        """Add up the time between what :meth:`now` returned."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize(self.device)
        seconds = dict.fromkeys(self.names, 0.0)
        for name, begin, end in spans:
            seconds[name] += begin.elapsed_time(end) / 1000 if is_cuda else end - begin
        return seconds

"""What the tests of faults in sweeps share: a chain, its files, stores that fail, processes on one thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fault_helpers import in_a_child
from planning_helpers import Recording
from torch import Tensor

from rmm_linear.planning import sweep

STEPS, INTERVAL = 30, 4
SIZE = 1 << 12


def step(number: int, u: Tensor) -> Tensor:
    return torch.sin(u) + 0.01 * number


def initial() -> Tensor:
    return torch.linspace(0, 1, SIZE).requires_grad_()


def run(u: Tensor, store: Any, advance: Callable[[int, Tensor], Tensor] = step) -> Tensor:
    return sweep(advance, u, STEPS, slots=2, store=store, interval=INTERVAL)


def alone(job: Callable[[], int]) -> int:
    """Run in a forked process, on one thread: those that its parent computes with are not in it."""

    def child() -> int:
        torch.set_num_threads(1)
        return job()

    return in_a_child(child)


def file_of(folder: Path, number: int) -> Path:
    for _ in range(500):  # the thread may not be there yet
        found = list(folder.glob(f"rmm-*/*-{number:08d}.safetensors"))
        if found:
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"no file of step {number}")


def is_tidy(folder: Path) -> bool:
    gc.collect()
    return list(folder.iterdir()) == []


class Failing(Recording):
    """A store of the user's own that fails at one state."""

    def __init__(self, what: str, number: int, fault: Callable[[], Any]) -> None:
        super().__init__()
        self.fail_at, self.fault = (what, number), fault

    def put(self, key: str, tensors: list[Tensor]) -> None:
        super().put(key, tensors)
        if self.done[-1] == self.fail_at:
            self.fault()

    def get(self, key: str) -> list[Tensor]:
        found = super().get(key)
        return self.fault() if self.done[-1] == self.fail_at else found

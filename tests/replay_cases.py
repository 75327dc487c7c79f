"""Executors that run parts of a step again, and what a user does with a model, with any of them or a plain loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from replay_parts import ROWS, WIDTH, Block, Part
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rmm_linear.planning import BlockPlan, ChainPlan, PlannedBlock, bptt, checkpoint_chain, order, plan_graph, sweep

STEPS = 6

# Executors: prepare(blocks, folder) returns what runs the blocks one after another.


def planned(choice: str) -> Any:
    def prepare(blocks, folder):
        inner = [(f"{n}.first", f"{n}.second") if choice == "nested" else () for n in range(len(blocks))]
        rows = [PlannedBlock(f"{n}", choice, inner=names) for n, names in enumerate(inner)]
        return BlockPlan(rows, folder=str(folder)).apply(nn.Sequential(*blocks))

    return prepare


@functools.cache
def graph_plan(part: type[Part], method: str) -> Any:
    model, x = nn.Sequential(*made(part, "graph")), torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    plan = plan_graph(model, x, "least", method=method.split()[0])
    return order(model, x, plan) if method.endswith("ordered") else plan


def graphed(method: str) -> Any:
    return lambda blocks, folder: graph_plan(type(blocks[0].first), method).apply(nn.Sequential(*blocks))


def chained(blocks: Any, folder: Path) -> Any:
    parts = [part for block in blocks for part in (block.first, block.second)]
    return lambda x: checkpoint_chain(parts, x, ChainPlan(0, (0, 2, 5, 6)))


class Cell(nn.Module):
    """A block as a cell of bptt."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, _: Any, state: Tensor) -> Any:
        return None, self.block(state)


class Step(Cell):
    """A block as a step of sweep."""

    def forward(self, _: Any, state: Tensor) -> Any:
        return self.block(state)


def rolled(make: Callable[[nn.Module], Any] = Cell, slots: int = 2, **options: Any) -> Any:
    def prepare(blocks, folder):
        cell = make(blocks[0])
        return lambda x: bptt(cell, torch.zeros(STEPS, 1), x, slots=slots, **options)[1]

    return prepare


def swept(make: Callable[[nn.Module], Any] = Step, store: str | None = None, **options: Any) -> Any:
    def prepare(blocks, folder):
        step = make(blocks[0])
        return lambda x: sweep(step, x, STEPS, store=folder if store == "folder" else store, **options)

    return prepare


EXECUTORS = {
    **{f"plan_blocks {choice}": planned(choice) for choice in ("recompute", "nested", "offload")},
    **{
        f"plan_blocks {choice} + offload": planned(f"{choice} + offload")
        for choice in ("recompute", "selective", "attention")
    },
    **{f"plan_graph {method}": graphed(method) for method in ("cuts", "cuts ordered", "chen", "kusumoto")},
    "checkpoint_chain": chained,
    "bptt both": rolled(),
    "bptt slots=0": rolled(slots=0),
    "bptt slots=100": rolled(slots=100),
    "bptt states": rolled(internal=False),
    "bptt graphs": rolled(internal="only"),
    "bptt of a function": rolled(lambda block: lambda _, state: (None, block(state))),
    "sweep slots=1": swept(slots=1),
    "sweep slots=2": swept(slots=2),
    "sweep slots=100": swept(slots=100),
    "sweep cpu interval=2": swept(slots=1, store="cpu", interval=2),
    "sweep folder sqrt": swept(slots=2, store="folder", interval="sqrt"),
    "sweep folder auto": swept(slots=2, store="folder"),
    "sweep levels": swept(store="cpu", levels=[("ram", 1), ("disk", 2, 0.1, 0.1)]),
    "sweep of a function": swept(lambda block: lambda _, state: block(state), slots=2),
}


def kind_of(executor: str) -> str:
    """Return "loop" for a block that runs again and again, "stack" for three blocks, "graph" for two, as it is slow."""
    return {"bptt": "loop", "sweep": "loop", "plan_graph": "graph"}.get(executor.split()[0], "stack")


def made(part: type[Part], kind: str) -> nn.ModuleList:
    """Return the blocks that run one after another; their weights are always the same."""
    torch.manual_seed(0)
    count = 2 if kind == "graph" else 3
    blocks = nn.ModuleList([Block(part)] * STEPS if kind == "loop" else (Block(part) for _ in range(count)))
    parts = [module for module in blocks.modules() if isinstance(module, Part)]
    parts[0].arrange(parts)
    return blocks


@dataclass
class Trial:
    """One model, and what runs it."""

    run: Callable[[Tensor], Tensor]
    blocks: nn.ModuleList
    x: Tensor
    is_plain: bool

    @classmethod
    def of(cls, part: type[Part], kind: str, executor: str = "", folder: Path | None = None) -> Trial:
        """Make a model; without an executor, one that runs block by block."""
        blocks, x = made(part, kind), torch.randn(ROWS, WIDTH, requires_grad=True)
        run = EXECUTORS[executor](blocks, folder) if executor else nn.Sequential(*blocks)
        torch.manual_seed(1)
        return cls(run, blocks, x, not executor)

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.blocks.parameters()]

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.blocks.buffers()]

    def backward(self, y: Tensor, **options: Any) -> list[Tensor]:
        torch.rand(3)  # who repeats a step must set the generator, and set it back
        y.square().sum().backward(**options)
        return [y.detach()]

    def seen(self) -> list[Tensor | None]:
        """Return gradients, parameters, buffers, the generator's state, and what hooks have seen."""
        grads = [None if leaf.grad is None else leaf.grad.clone() for leaf in self.leaves]
        hooks = getattr(self.blocks[0].first, "seen", [])
        values = [leaf.detach().clone() for leaf in self.leaves]
        return [*grads, *values, *self.buffers, torch.get_rng_state(), *(one for seen in hooks for one in seen)]


# Procedures: what a user does; each returns what it sees besides Trial.seen.


def once(trial: Trial) -> list[Any]:
    return trial.backward(trial.run(trial.x))


def on_a_copy(trial: Trial) -> list[Any]:
    return trial.backward(trial.run(trial.x * 1))


def without_its_gradient(trial: Trial) -> list[Any]:
    return trial.backward(trial.run(trial.x.detach()))


def twice(trial: Trial) -> list[Any]:
    return once(trial) + once(trial)


def retained(trial: Trial) -> list[Any]:
    y = trial.run(trial.x)
    trial.backward(y, retain_graph=True)
    return trial.seen() + trial.backward(y)


def two_at_once(trial: Trial, *, reverse: bool = False) -> list[Any]:
    found = [trial.run(trial.x), trial.run(trial.x * 0.5)]
    return [seen for y in (reversed(found) if reverse else found) for seen in trial.backward(y)]


def in_a_checkpoint(trial: Trial, *, reentrant: bool = False) -> list[Any]:
    return trial.backward(checkpoint(trial.run, trial.x, use_reentrant=reentrant))


def under_autocast(trial: Trial, *, cached: bool = True) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        y = trial.run(trial.x)
    return trial.backward(y)


def beside_a_plain_run(trial: Trial) -> list[Any]:
    """Autocast's cache must not hand casts without a gradient on to what comes next."""
    with torch.autocast("cpu", torch.bfloat16):
        y = trial.run(trial.x)
        y = y + trial.blocks[0](trial.x)
    return trial.backward(y)


def then(change: Callable[[Trial], Any], *, around: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """Change something between the forward and the backward pass."""

    def procedure(trial: Trial) -> list[Any]:
        parameters = [*trial.blocks.parameters()]  # one may be replaced
        with around():
            y = trial.run(trial.x)
        with torch.no_grad():
            change(trial)
        return [*trial.backward(y), *(parameter.grad for parameter in parameters)]

    return procedure


def replace_weight(trial: Trial) -> None:
    linear = trial.blocks[0].first.linear
    linear.weight = nn.Parameter(linear.weight * 1.5)


class Broken(Exception):
    """What the failing operator raises."""


class Failing(TorchDispatchMode):
    """Lets tanh fail after some runs of it."""

    def __init__(self, runs: int) -> None:
        super().__init__()
        self.left, self.has_failed = runs, False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.tanh.default:
            self.left -= 1
            if self.left < 0:
                self.has_failed = True
                raise Broken
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def failing(runs: int, *, must: bool) -> Iterator[None]:
    with contextlib.suppress(Broken), Failing(runs) as mode:
        yield
    assert mode.has_failed or not must


def failed_forward(trial: Trial) -> list[Any]:
    """A step after one whose forward pass failed."""
    before = trial.buffers
    with failing(3, must=True):
        trial.run(trial.x)
    for buffer, value in zip(trial.blocks.buffers(), before, strict=True):
        buffer.copy_(value)
    torch.manual_seed(1)
    return once(trial)


def failed_repetition(trial: Trial) -> list[Any]:
    """What a repetition that failed has left, and a step after it."""
    y = trial.run(trial.x)
    with failing(0, must=not trial.is_plain):
        trial.backward(y)
    for leaf in trial.leaves:
        leaf.grad = None
    return trial.seen() + once(trial)

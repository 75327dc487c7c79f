"""Backpropagation through time as it runs: steps against the plan's, gradients and bytes against a plain loop's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.records import Origin, show, write_rows
from rmm_linear.memory import peak
from rmm_linear.planning import bptt, step_bytes
from rmm_linear.planning.chains.cells import adapted

SEED = 0
CSV = "chains-bptt.csv"


@dataclass(frozen=True)
class Run(Origin):
    """One run forward and backward.

    Attributes:
        cell: Which cell.
        steps: T.
        batch: Sequences.
        hidden: Width of the state, and of the inputs.
        policy: "plain", "states", "graphs" or "both".
        budget: What was asked for.
        slots: Slots of the plan.
        planned_steps: Forward steps of the plan.
        counted_steps: Steps that ran, without two trial steps.
        time_ratio: (planned_steps / T + 2) / 3.
        planned_bytes: What the plan says is kept.
        peak_bytes: Peak of tensors made in the run, outputs and the gradient of the inputs among them, and the
            random generators' states.
        recurrent_bytes: The same where there are neither: the loss takes the last state alone, inputs need no gradient.
        share: recurrent_bytes by those of the plain loop.
        gradients: "equal" to the plain loop's to the bit, or the largest difference by the largest gradient.
        internal_cost: Slots of a graph; None where graphs are not kept.
        seed: Of everything.
    """

    cell: str
    steps: int
    batch: int
    hidden: int
    policy: str
    budget: str
    slots: int
    planned_steps: int
    counted_steps: int
    time_ratio: float
    planned_bytes: int | None
    peak_bytes: int
    recurrent_bytes: int
    share: float
    gradients: str
    internal_cost: int | None = None
    seed: int = SEED


class Dropping(nn.Module):
    """An LSTM cell with dropout on its inputs."""

    def __init__(self, hidden: int) -> None:
        """Make the cell."""
        super().__init__()
        self.cell = nn.LSTMCell(hidden, hidden)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run one step."""
        h, c = self.cell(nn.functional.dropout(x, 0.1), state)
        return h, (h, c)


class Quiet(nn.Module):
    """A cell that puts out nothing but its last state."""

    def __init__(self, cell: nn.Module) -> None:
        """Wrap a cell."""
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, state: Any) -> tuple[None, Any]:
        """Run one step."""
        step, state = adapted(self.cell, state, x)
        return None, step(x, state)[1]


def run(out: Path, about: dict[str, Any], tiny: bool) -> str:
    """Write chains-bptt.csv and return it as a table.

    Args:
        out: Folder of the csv file.
        about: Where the rows come from.
        tiny: Whether sizes are small.

    Returns:
        The table.
    """
    steps, batch, hidden = (60, 2, 8) if tiny else (1000, 16, 64)
    rows: list[Run] = []
    for name, make in (
        ("LSTM", lambda: nn.LSTMCell(hidden, hidden)),
        ("LSTM, dropout", lambda: Dropping(hidden)),
        ("GRU", lambda: nn.GRUCell(hidden, hidden)),
    ):
        rows += runs(name, make, (steps, batch, hidden), about)
    write_rows(out / CSV, rows)
    return show(rows)


def runs(name: str, make: Callable[[], nn.Module], shape: tuple[int, int, int], about: dict[str, Any]) -> list[Run]:
    """Run a cell as a plain loop and by the three policies."""
    steps, batch, hidden = shape
    torch.manual_seed(SEED)
    cell, x = make(), torch.randn(steps, batch, hidden, requires_grad=True)
    state = tuple(torch.zeros(2, batch, hidden)) if "LSTM" in name else torch.zeros(batch, hidden)
    calls: list[int] = []
    cell.register_forward_pre_hook(lambda *_: calls.append(1))
    measured = step_bytes(cell, x, state)
    tenth, graphs = steps // 20, measured.graph * steps
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("plain", "", {}),
        ("states", f"{tenth} states", {"slots": tenth, "internal": False}),
        ("graphs", f"{tenth} graphs, 5 %", {"slots": tenth, "internal": "only"}),
        ("both", "5 % of all graphs", {"memory": graphs // 20 + measured.graph}),
        ("both", "5 % of plain", {"memory": measured.plain * steps // 20 + measured.graph}),
    ]
    found: list[Run] = []
    expected: list[Tensor] = []
    for policy, budget, options in asked:
        plan = measured.plan(steps, **({"slots": steps, "internal": "only"} if policy == "plain" else options))
        forward, kept = plan.forward_steps, plan.bytes  # makes the table of splits, which is none of a run's tensors
        for leaf in (x, *cell.parameters()):
            leaf.grad = None
        calls.clear()
        torch.manual_seed(SEED)
        with peak("cpu") as made, generator_bytes() as drawn:
            outputs = _loop(cell, x, state) if policy == "plain" else bptt(cell, x, state, **options)[0]
            outputs.sum().backward()
        count = len(calls)
        grads = [leaf.grad for leaf in (x, *cell.parameters()) if leaf.grad is not None]
        expected = expected or grads
        trials = 2 if policy == "both" else 0
        del outputs
        recurrent = _recurrent(cell, x.detach(), state, options)
        share = recurrent / (found[0].recurrent_bytes if found else recurrent)
        numbers = (forward, count - trials, plan.time_ratio, kept, made.bytes + drawn.most, recurrent, share)
        fixed = (name, *shape, policy, budget, plan.slots)
        found.append(Run(*fixed, *numbers, _difference(expected, grads), plan.internal_cost, **about))
    return found


def _recurrent(cell: nn.Module, x: Tensor, state: Any, options: dict[str, Any]) -> int:
    """Peak of a run without outputs and without a gradient of the inputs."""
    quiet = Quiet(cell)
    quiet.zero_grad()
    with peak("cpu") as made, generator_bytes() as drawn:
        if options:
            last = bptt(quiet, x, state, **options)[1]
        else:
            last = state
            for x_t in x.unbind(0):
                last = quiet(x_t, last)[1]
        (last if isinstance(last, Tensor) else last[0]).sum().backward()
    return made.bytes + drawn.most


class _Living:
    """Bytes of the random generators' states that are alive, and the most there were."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def made(self, state: Tensor) -> Tensor:
        self.now += state.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(state, self.gone, state.nbytes)
        return state

    def gone(self, count: int) -> None:
        self.now -= count


@contextmanager
def generator_bytes() -> Iterator[_Living]:
    """Count the CPU generator's states, which are made outside of what ``peak`` sees.

    Yields:
        The count.
    """
    found, read = _Living(), torch.get_rng_state

    def seen() -> Tensor:
        return found.made(read())

    with mock.patch.object(torch, "get_rng_state", seen):
        yield found


def _loop(cell: nn.Module, x: Tensor, state: Any) -> Tensor:
    step, state = adapted(cell, state, x[0])
    outputs = []
    for x_t in x.unbind(0):
        output, state = step(x_t, state)
        outputs.append(output)
    return torch.stack(outputs)


def _difference(expected: list[Tensor], found: list[Tensor]) -> str:
    if all(torch.equal(old, new) for old, new in zip(expected, found, strict=True)):
        return "equal"
    largest = max(float((old - new).abs().max() / old.abs().max()) for old, new in zip(expected, found, strict=True))
    return f"{largest:.1e}"

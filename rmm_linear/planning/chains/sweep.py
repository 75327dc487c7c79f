"""Differentiate long chains of steps in little memory: some states are saved, the others computed again.

Revolve (Griewank & Walther 2000) saves states in memory alone; what it computes again grows with the length of the
chain. Kukreja et al. (2018) also send a state to a slow store as often as the transfer hides behind the computation, so
that the work per step does not depend on the length. H-Revolve (Herrmann & Pallez 2020) counts what a transfer costs,
and double checkpointing stores every √n-th state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.utils._pytree import tree_unflatten

from rmm_linear.planning.chains.sweep_function import differentiable_run
from rmm_linear.planning.chains.sweep_run import Length
from rmm_linear.planning.chains.sweep_settings import Settings, SweepReport
from rmm_linear.planning.chains.sweep_steps import Stepper
from rmm_linear.planning.replay.snapshots import flatten
from rmm_linear.planning.stores.base import Store

State = TypeVar("State")


def sweep(
    step: Callable[[int, State], State],
    state: State,
    steps: int | Callable[[int, State], Any],
    *,
    slots: int | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    interval: int | Literal["auto", "sqrt"] = "auto",
    length: int | None = None,
    levels: Sequence[tuple[Any, ...]] | None = None,
    report: SweepReport | None = None,
) -> State:
    """Run a chain ``state = step(i, state)`` so that it can be differentiated in little memory.

    Gradients are those of the plain loop, to the bit on a CPU: with respect to the initial state and to the parameters
    that step reaches. Without a store, ``slots`` states are saved and Revolve's schedule computes the others again, the
    fewest steps that are possible. With a store, every ``interval``-th state goes there on a thread while the chain
    goes on, and the backward pass fetches the one before while it works on an interval: the work per step does not grow
    with the number of steps.

    Memory: ``slots`` states, the graph of one step, the initial state, and with a store up to 2 states on their way;
    ``levels`` take one more.

    ``step`` must be a function of its arguments, its parameters, its buffers and the global random generators, and it
    must return a new state. Buffers and generators are set for every repetition as the first run had them: buffers of
    the module that step is or belongs to, or of modules that a function names. Under ``torch.no_grad`` this is the
    plain loop.

    Args:
        step: ``step(i, state) -> state``, with the state's structure unchanged: a function or an nn.Module. What it
            captures and needs gradients for must be leaves (parameters), and step 0 must reach all of them, unless step
            is a module, or a method of one, that has them.
        state: Initial state: a pytree of dense tensors, of any dtypes. What never changes is better captured.
        steps: Number of steps; or a condition ``steps(i, state) -> bool`` asked before step i, which ends the chain: a
            solver with adaptive steps has its time in the state. A condition needs a store.
        slots: States to save in fast memory, the one that a piece starts from among them.
        store: None; a folder for files; "cpu" for states of an accelerator in the CPU's memory; or an object with
            ``put(key, tensors)``, ``get(key)`` and ``drop(key)``.
        interval: Steps from one stored state to the next: a number; "auto" for ⌈time of a transfer / time of a step⌉,
            measured on the first steps, without the store where Revolve alone takes no more steps; or "sqrt" for ⌈√n⌉,
            which is double checkpointing.
        length: Where ``steps`` is a condition, about how many steps there will be: what "sqrt" takes the root of.
        levels: In place of ``slots`` and ``interval``: ``[("ram", slots), ("disk", slots, write, read)]``, the states
            in fast memory and in the store and how many forward steps a write and a read last; measured without the
            two. H-Revolve's schedule then weighs them against steps.
        report: Object to fill in.

    Returns:
        The final state.

    Raises:
        ValueError: If an argument is out of range, or two contradict each other.
        StoreError: If the store is a file, before any step runs, or a state does not come back from it.

    Example:
        >>> u = torch.ones(3, dtype=torch.float64, requires_grad=True)
        >>> final = sweep(lambda i, u: u - 0.001 * u**3, u, 1000, slots=6)
        >>> _ = torch.autograd.grad(final.sum(), u)  # of 1000 states, 6 were saved at any time
    """
    settings = Settings.read(steps, slots, store, interval, length, levels)
    return _uncompiled(step, state, steps, settings, report if report is not None else SweepReport())


def _run(step: Any, state: Any, steps: Any, settings: Settings, report: SweepReport) -> Any:
    report.reset()
    leaves, structure = flatten(state, "the initial state")
    stepper, length = Stepper(step, structure), Length(steps, structure)
    if not length.has(0, leaves):
        return state
    if torch.is_grad_enabled():
        leaves = differentiable_run(stepper, leaves, length, settings, report)
    else:
        number = 0
        while length.has(number, leaves):
            leaves, number = stepper.run(number, leaves), number + 1
        report.steps, report.forward_steps = number, stepper.count
    return tree_unflatten(leaves, structure)


_uncompiled: Any = torch.compiler.disable(_run)  # it decides by what it finds as it runs

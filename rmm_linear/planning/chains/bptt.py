"""Backpropagation through time in little memory, for any cell."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from rmm_linear.planning.chains.bptt_plans import StepBytes
from rmm_linear.planning.chains.bptt_run import BPTTRun, Outputs
from rmm_linear.planning.chains.bptt_trial import check_reached, try_step
from rmm_linear.planning.chains.cells import Cell, Step, adapted, module_of
from rmm_linear.planning.replay.reached import leaves_behind
from rmm_linear.planning.stores.open import open_store


def bptt(
    cell: Cell | Any,
    inputs: Any,
    state: Any,
    *,
    memory: int | str | None = None,
    slots: int | None = None,
    internal: bool | Literal["only"] = True,
    store: Any = None,
) -> tuple[Any, Any]:
    """Run a recurrent cell over all steps so that the backward pass takes a given memory.

    Some states, and some steps with their graphs, are saved; the backward pass computes the others again, with the
    fewest forward steps that the memory allows (Gruslys et al. 2016). Outputs and gradients are those of a plain loop:
    steps run and gradients add up in its order. A state that a cell reads more than once may differ in the last digit,
    because the parts of its gradient add up in another order. Under autocast, the steps' gradients of a weight add up
    in its own dtype, not in the one it is cast to.

    Steps that run again draw the same random numbers, under the same autocast. Buffers are updated once, and a step
    that runs again reads what they held when it first ran: buffers of the module that the cell is, or of modules that a
    function names. A cell must have no other side effects: it runs more than once per step.
    Without gradients it runs once, and nothing is saved.

    Args:
        cell: ``cell(x_t, state) -> (output, state)``, or PyTorch's ``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``,
            whose output is h. A module, a method of one or a partial call of one must reach no other tensors that need
            gradients. For any other function they are found by two trial steps per call of ``bptt``.
        inputs: A tensor or a tree (tuples, lists, dictionaries) of tensors, all with time first; ``x_t`` is one step of
            it.
        state: The initial state, a tree. What is no tensor, or an integer, has no gradient. None is zeros for PyTorch's
            cells.
        memory: Bytes for what is saved between the steps of the backward pass, or a text such as "64MB": stored states
            and graphs, with the states of random generators and changed buffers that belong to them. Outputs, inputs
            and gradients are not part of it. Two trial steps measure a state and a graph. States in a ``store`` count
            as those in memory do.
        slots: Number of states that may be stored, in place of ``memory``; graphs count as many as they measure. The
            initial state is not counted (:func:`sweep` counts it): 0 repeats every step from it.
        internal: Which of the paper's policies: False stores states alone, "only" graphs of recorded steps alone (then
            ``slots`` counts graphs), True whatever costs fewer steps.
        store: Where stored states go: a folder, "cpu", or an object with ``put(key, tensors)``, ``get(key)`` and
            ``drop(key)``, see :func:`rmm_linear.planning.open_store`; None leaves them where they are. Graphs of
            recorded steps, and generators' states, stay in memory: ``internal=False`` saves no graphs.

    Returns:
        The outputs, a tree with time first, and the last state.

    Raises:
        TypeError: If the cell runs all steps at once as nn.LSTM does, or an argument has the wrong type.
        ValueError: If there is no step, the memory is too small, arguments exclude each other, or the cell depends on
            tensors that it must not.
        StoreError: If a state cannot be stored, or does not come back as it was.

    Example:
        >>> cell = torch.nn.LSTMCell(8, 16)
        >>> x = torch.randn(100, 4, 8)
        >>> outputs, (h, c) = bptt(cell, x, None, memory="40KB")
        >>> outputs.square().mean().backward()
    """
    if (memory is None) == (slots is None):
        raise ValueError(f"bptt needs memory or slots, and not both, got memory={memory!r} and slots={slots!r}.")
    if store is not None and internal == "only":
        raise ValueError(f'internal="only" stores no states, got store={store!r} too. Use internal=False or True.')
    StepBytes(1, 1, 1).plan(1, memory=memory, slots=slots, internal=internal)  # checks them, with gradients or without
    with contextlib.ExitStack() as opened:
        used = None if store is None else open_store(store)
        if used is not store:
            opened.callback(used.close)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        return _run(cell, inputs, state, memory, slots, internal, used, opened)


def _run(
    cell: Any,
    inputs: Any,
    state: Any,
    memory: int | str | None,
    slots: int | None,
    internal: bool | Literal["only"],
    store: Any,
    opened: contextlib.ExitStack,
) -> tuple[Any, Any]:
    """As :func:`bptt`; ``opened`` closes the store, once the run needs it no more."""
    step, leaves, initial, steps = _prepared(cell, inputs, state)
    if not torch.is_grad_enabled():
        return _loop(step, leaves, initial, steps)
    module = module_of(step.cell)
    is_measured = module is None or memory is not None or internal is True
    trial = try_step(step, [leaf[0] for leaf in leaves], initial) if is_measured else None
    measured = StepBytes(1, 1, 1) if trial is None else trial.bytes
    plan = measured.plan(steps, memory=memory, slots=slots, internal=internal)
    run = BPTTRun(step, plan, None if module is not None or trial is None else trial.parameters, store)
    tensors = [leaf for leaf in initial if isinstance(leaf, Tensor)]
    if not any(tensor.requires_grad for tensor in (*leaves, *tensors, *run.parameters)):
        return _loop(step, leaves, initial, steps)
    if module is None and any(parameter._backward_hooks for parameter in run.parameters):
        raise ValueError(
            "The parameters of a cell that is a function must have no hooks, which would see the gradients of single "
            "steps. Give an nn.Module, whose parameters' hooks see the sum."
        )
    closing = weakref.finalize(run, opened.pop_all().close)
    try:
        found = _Through.apply(run, initial, len(leaves), *leaves, *tensors, *run.parameters)
    except BaseException:  # its traceback keeps the run
        closing()
        raise
    results = iter(found)
    outputs = [None if leaf is None else next(results) for leaf in run.output_leaves]
    last = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in run.last_leaves]
    run.output_leaves = run.last_leaves = []
    return step.output_tree(outputs), step.state_tree(last)


def step_bytes(cell: Cell | Any, inputs: Any, state: Any) -> StepBytes:
    """Measure what one step of a cell saves, by two trial steps; see :func:`bptt` for the arguments.

    Args:
        cell: The cell.
        inputs: Inputs of all steps, or of some of them, time first.
        state: The initial state.

    Returns:
        Bytes of the state and of a recorded step's graph; its method ``plan`` makes plans.

    Example:
        >>> measured = step_bytes(torch.nn.LSTMCell(8, 16), torch.randn(100, 4, 8), None)
        >>> measured.state, measured.graph, measured.internal_cost
        (512, 2304, 5)
        >>> measured.plan(100, memory=40_000).forward_steps
        185
    """
    step, leaves, initial, _ = _prepared(cell, inputs, state)
    return try_step(step, [leaf[0] for leaf in leaves], initial).bytes


def _prepared(cell: Any, inputs: Any, state: Any) -> tuple[Step, list[Tensor], list[Any], int]:
    """Return the cell on leaves, the leaves of inputs and state, and T."""
    leaves, spec = tree_flatten(inputs)
    lengths = {leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        raise ValueError(f"inputs must be tensors with time first, all of one length, got {shapes}.")
    (steps,) = lengths
    if not steps:
        raise ValueError("inputs must have at least one step, got none: what the cell would put out is not known.")
    cell, state = adapted(cell, state, leaves[0][0])
    initial, state_spec = tree_flatten(state)
    return Step(cell, spec, state_spec), leaves, initial, steps


def _loop(step: Step, leaves: list[Tensor], state: list[Any], steps: int) -> tuple[Any, Any]:
    """Run all steps once, and save nothing."""
    outputs = Outputs(steps)
    for number in range(steps):
        found, state = step([leaf[number] for leaf in leaves], state)
        if torch.is_grad_enabled():  # then nothing that is known needs a gradient
            needing = [leaf for leaf in (*found, *state) if isinstance(leaf, Tensor) and leaf.requires_grad]
            check_reached(leaves_behind(needing), (), module_of(step.cell))
        outputs.put(number, found)
    return step.output_tree(outputs.leaves or []), step.state_tree(state)


class _Through(torch.autograd.Function):
    """All steps as one function of inputs, initial state and parameters."""

    @staticmethod
    def forward(ctx: Any, run: BPTTRun, state: list[Any], inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        run.output_leaves, run.last_leaves = run.forward(list(tensors[:inputs]), state)
        ctx.run, ctx.inputs = run, inputs
        # Others than tensors of the initial state stand where they stood.
        ctx.state = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in state]
        ctx.save_for_backward(*tensors)
        results = [leaf for leaf in (*run.output_leaves, *run.last_leaves) if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*(one for one in results if not (one.is_floating_point() or one.is_complex())))
        ctx.kept = (
            [leaf is not None for leaf in run.output_leaves],
            [isinstance(leaf, Tensor) for leaf in run.last_leaves],
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "bptt does not support double backward, so a backward pass with create_graph=True is not possible. "
                "Run the steps in a loop of your own where second derivatives are needed."
            )
        saved, found = iter(ctx.saved_tensors), iter(grads)
        inputs = [next(saved) for _ in range(ctx.inputs)]
        state = [next(saved) if leaf is None else leaf[0] for leaf in ctx.state]
        outputs, last = ([next(found) if is_tensor else None for is_tensor in kept] for kept in ctx.kept)
        results = ctx.run.backward(inputs, state, outputs, last)
        is_tensor = [True] * ctx.inputs + [leaf is None for leaf in ctx.state]
        head = [value for value, kept in zip(results, is_tensor, strict=False) if kept]
        return None, None, None, *head, *results[len(is_tensor) :]

"""Run a sweep as one node of autograd's graph: learn from the first steps, and compute its gradients."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rmm_linear.planning.chains import schedules
from rmm_linear.planning.chains.sweep_run import Gradients, Length, SweepRun
from rmm_linear.planning.chains.sweep_settings import Settings, SweepReport
from rmm_linear.planning.chains.sweep_steps import Stepper, reached
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.replay.snapshots import Snapshot, is_differentiable
from rmm_linear.planning.stores.open import open_store
from rmm_linear.planning.stores.transfers import Transfers, wait_for_devices

_TIMED = 3  # steps whose time is measured


def differentiable_run(
    stepper: Stepper, leaves: Sequence[Tensor], length: Length, settings: Settings, report: SweepReport
) -> list[Tensor]:
    schedules.package()  # says at once that it is missing
    owned = [] if stepper.module is None else [p for p in stepper.module.parameters() if p.requires_grad]
    replayed = Replayed(stepper.modules, leaves, draws=True)
    early = {0: Snapshot.of(0, [leaf.detach() for leaf in leaves], replayed.seen())}
    with contextlib.ExitStack() as opened:
        transfers = None
        if settings.store is not None and length.known != 1:  # a store that is none is refused before anything runs
            transfers = Transfers(open_store(settings.store), owned=not hasattr(settings.store, "put"))
            opened.callback(transfers.close)
        with replayed.autocast():
            parameters, early[1] = _first_step(stepper, leaves, owned, replayed, early[0])
            if not parameters and not any(leaf.requires_grad for leaf in leaves):
                return _without_gradients(stepper, early[1].leaves, length, report)
            schedule, uses_store = _schedule(stepper, early, length, settings, replayed, transfers, report)
        if uses_store:
            opened.pop_all()
        else:
            transfers = None
    run = SweepRun(stepper, schedule, length, early, replayed, parameters, transfers, report)
    return list(_Sweep.apply(run, len(leaves), *leaves, *parameters))


def _first_step(
    stepper: Stepper, leaves: Sequence[Tensor], owned: Sequence[Tensor], replayed: Replayed, begin: Snapshot
) -> tuple[list[Tensor], Snapshot]:
    """Run step 0 with its graph; return the parameters it reaches apart from a module's own, and its result."""
    with torch.enable_grad():
        before: Any = torch.ones((), requires_grad=True).view(()).grad_fn
    recorded = stepper.record(0, leaves, [leaf.requires_grad for leaf in leaves])
    found = {id(leaf): leaf for leaf in owned}
    found |= {id(leaf): leaf for leaf in reached(recorded, since=before._sequence_nr())}
    return [*found.values()], Snapshot.of(1, [leaf.detach() for leaf in recorded.outputs], replayed.seen(begin.seen))


def _without_gradients(stepper: Stepper, leaves: list[Tensor], length: Length, report: SweepReport) -> list[Tensor]:
    """Run the rest of a chain that seems to need no gradient, and raise if it does."""
    number = 1
    while length.has(number, leaves):
        leaves = stepper.run(number, leaves)
        if any(leaf.requires_grad for leaf in leaves):
            raise RuntimeError(
                f"step must reach the same parameters every time, but step {number} reaches the first one, and step 0 "
                "none. Make step an nn.Module that has all of them (or a method of one)."
            )
        number += 1
    report.steps, report.forward_steps = number, stepper.count
    return leaves


def _schedule(
    stepper: Stepper,
    early: dict[int, Snapshot],
    length: Length,
    settings: Settings,
    replayed: Replayed,
    transfers: Transfers | None,
    report: SweepReport,
) -> tuple[Any, bool]:
    """Return the schedule, and whether it uses the store."""
    slots, interval = settings.slots, settings.interval
    if length.known == 1:
        return schedules.two_level(1, slots), False
    if transfers is None:
        return schedules.in_memory(_known(length), slots), False
    costs = settings.costs
    if settings.disk is not None and costs is not None:
        return schedules.hierarchical(_known(length), slots, settings.disk, *costs), True
    if interval == "auto":
        measured = _measure(stepper, early, length, slots, replayed, transfers)
        if measured is None:  # the chain has ended before
            return schedules.two_level(max(early), slots), False
        report.step_seconds, report.transfer_seconds = measured
        ratio = report.transfer_seconds / max(report.step_seconds, 1e-9)
        if settings.disk is not None:
            return schedules.hierarchical(_known(length), slots, settings.disk, ratio, ratio), True
        interval = max(1, math.ceil(ratio))
        known = length.known
        if known is not None:
            alone = known + schedules.recomputed(known, slots)
            if alone <= schedules.two_level_steps(known, interval, slots):
                return schedules.in_memory(known, slots), False
    report.interval = int(interval)
    return schedules.two_level(int(interval), slots), True


def _measure(
    stepper: Stepper,
    early: dict[int, Snapshot],
    length: Length,
    slots: int,
    replayed: Replayed,
    transfers: Transfers,
) -> tuple[float, float] | None:
    """Time some steps, whose results are kept, and a transfer; None if the chain has ended before."""
    times = []
    number = max(early)
    leaves = early[number].leaves
    # The last step is not among them, where it is known: the backward pass may need its graph.
    while len(times) < min(_TIMED, slots) and number + 1 != length.known and length.has(number, leaves):
        wait_for_devices(replayed.devices)
        begin = time.perf_counter()
        leaves = stepper.advance(number, leaves)
        wait_for_devices(replayed.devices)
        times.append(time.perf_counter() - begin)
        number += 1
        early[number] = Snapshot.of(number, leaves, replayed.seen(early[number - 1].seen))
    if not times or length.known == number:
        return None
    return min(times), transfers.seconds(early[number].tensors)


def _known(length: Length) -> int:
    if length.known is None:
        raise ValueError("This schedule needs to know how many steps there are, got a condition. Give the number.")
    return length.known


class _Sweep(torch.autograd.Function):
    """The final state, as a function of the initial state and the parameters."""

    @staticmethod
    def forward(ctx: Any, run: SweepRun, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        final = run.forward([leaf.requires_grad for leaf in tensors[:count]])
        ctx.mark_non_differentiable(*[leaf for leaf in final if not is_differentiable(leaf)])
        return tuple(final)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # raises if one was changed in place
        again = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            initial, totals = ctx.run.backward(tensors[: ctx.count], list(gradients))
        found: Gradients = [*initial, *totals]
        return None, None, *(_once(found) if again else found)


class _Once(torch.autograd.Function):
    """Gradients that have none of their own, and say so."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "sweep has first derivatives only, got a gradient of its gradient. Take the second derivative of the plain "
            "loop, or of a chain of torch.utils.checkpoint."
        )


def _once(found: Gradients) -> Gradients:
    given = iter(_Once.apply(*(one.requires_grad_() for one in found if one is not None)) or ())
    return [None if one is None else next(given) for one in found]

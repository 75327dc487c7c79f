"""Steps of fit beside what PyTorch has for little memory, at the same peaks, in one run."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.library import FitReport, allocator_peak
from benchmarks.planning import fit_steps
from benchmarks.processes import first_line
from benchmarks.records import Origin
from benchmarks.suites import models

BUDGETS = (1.0, 0.5, 0.25, 0.1)  # of torch.compile
_PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu")


@dataclass(frozen=True, kw_only=True)
class Neighbour(Origin):
    """One model with one method. Peaks are bytes of a training process without an optimizer."""

    model: str  # title, with the batch
    method: str  # "exact", a method of PyTorch's, or "fit"
    beside: str = ""  # for "fit": the method whose peak is the budget
    memory: int | None = None  # for "fit": the budget in bytes
    live: int | None = None  # live bytes at the peak; empty where the step is compiled, whose tensors are not followed
    allocated: int | None = None  # the allocator's peak
    time: float | None = None  # median seconds of a step by those of the exact step
    seconds: float | None = None  # median seconds of a step
    noise: float | None = None  # for "fit": variance that is added to the gradient, by the minibatch's own
    status: str = "ok"  # "ok", or why there is no measurement
    plan: str = ""  # for "fit": how many blocks have each option
    seed: int = fit_steps.SEED  # of the weights and the batch


def neighbours(title: str, made: fit_steps.Made, about: Mapping[str, Any], *, tiny: bool = False) -> list[Neighbour]:
    """Measure a model exact, with every method of PyTorch's, and fitted to the peak of each of them."""
    model, batch = made
    base = Neighbour(model=title, method=fit_steps.EXACT, **about)
    fitting = fit_steps.options_of(model, batch)  # before anything is compiled
    before = fitting.static.before_step
    runs, rows = dict[str, fit_steps.Run](), dict[str, Neighbour]()
    for method, run in _eager(model, batch).items():
        runs[method] = run
        live, allocated = before + fit_steps.live_peak(model, run), before + _allocated(model, run)
        rows[method] = dataclasses.replace(base, method=method, live=live, allocated=allocated)
    for budget in BUDGETS[-1:] if tiny else BUDGETS:
        method, run, status = _compiled(model, batch, budget, tiny=tiny)
        rows[method] = dataclasses.replace(base, method=method, status=status)
        if run is not None:
            runs[method] = run
            rows[method] = dataclasses.replace(rows[method], allocated=before + _allocated(model, run))
    for method, row in [*rows.items()][1:]:
        memory = _live(row, rows[fit_steps.EXACT])
        if memory is None or memory >= (rows[fit_steps.EXACT].live or 0):
            continue  # nothing to fit
        key = f"{fit_steps.FIT}, {method}"
        here = dataclasses.replace(base, method=fit_steps.FIT, beside=method, memory=memory)
        found = fit_steps.fitted(fitting, memory)
        if isinstance(found, FitReport):
            run = runs[key] = fit_steps.step_of(found.plan.apply(models.twin(model)), batch)
            here = dataclasses.replace(
                here, live=found.peak, allocated=before + _allocated(model, run), noise=found.noise,
                plan=fit_steps.counts(found.plan.blocks),
            )  # fmt: skip
        else:
            here = dataclasses.replace(here, status=found)
        rows[key] = here
    seconds = fit_steps.medians(model, runs, 1 if tiny else fit_steps.ROUNDS)
    torch._dynamo.reset()
    return fit_steps.with_times(rows, seconds)


def _live(row: Neighbour, exact: Neighbour) -> int | None:
    """Live bytes of a method; where they cannot be followed, by how much the allocator's peak is lower."""
    if row.live is not None or row.allocated is None:
        return row.live
    return (exact.live or 0) - (exact.allocated or 0) + row.allocated


def _allocated(model: nn.Module, run: fit_steps.Run) -> int:
    fit_steps.clear(model)
    found = allocator_peak(run)
    fit_steps.clear(model)
    return found


def _eager(model: nn.Module, batch: Any) -> dict[str, fit_steps.Run]:
    """The exact step, and steps that save less without compilation."""
    whole, selective = models.twin(model), models.twin(model)
    models.checkpoint(whole)
    aten = torch.ops.aten
    products = [packet.default for name in _PRODUCTS if (packet := getattr(aten, name, None)) is not None]
    contexts = functools.partial(create_selective_checkpoint_contexts, products)
    for block in (block for blocks in fit_steps.lists_of_blocks(selective) for block in blocks):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    exact = fit_steps.step_of(model, batch)

    def copied_out() -> None:
        with save_on_cpu(pin_memory=True):  # without it, a tensor of the CPU is its own copy
            exact()

    count = sum(len(blocks) for blocks in fit_steps.lists_of_blocks(model))
    return {
        fit_steps.EXACT: exact,
        f"torch.utils.checkpoint, {count} of {count} blocks": fit_steps.step_of(whole, batch),
        "selective checkpoint, products kept": fit_steps.step_of(selective, batch),
        "save_on_cpu": copied_out,
    }


def _compiled(model: nn.Module, batch: Any, budget: float, *, tiny: bool) -> tuple[str, fit_steps.Run | None, str]:
    """The name of a compiled step, the step once it is compiled, and "ok" or what went wrong."""
    name = "aot_eager" if tiny or shutil.which("g++") is None else "inductor"
    base: Any = lookup_backend(name)

    def backend(graph: Any, inputs: Any) -> Any:  # a function of its own: compiled code is not shared between budgets
        from torch._functorch import config

        with config.patch(activation_memory_budget=budget):
            return base(graph, inputs)

    title = f"torch.compile ({name}), budget {budget:g}"
    run = fit_steps.step_of(torch.compile(models.twin(model), backend=backend), batch)  # pyright: ignore[reportArgumentType]
    try:
        fit_steps.clear(model)
        run()
    except Exception as error:
        return title, None, first_line(error)
    return title, run, "ok"

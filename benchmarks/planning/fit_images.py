"""Plans of fit for convolutional networks: of recomputation alone, which are exact, and of codes as well.

The floor is what no plan can save: parameters, buffers, and gradients of all parameters that are trained. A budget is
the floor and a share of what the exact step's peak has above it, or the least memory that is found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import library
from benchmarks.planning import fit_steps
from benchmarks.planning.networks import images
from benchmarks.records import Origin
from benchmarks.suites import models

IMAGES = images(96)
SHARES = (0.75, 0.5)
_ROUNDS = 3
LEAST = "least"
METHODS = {
    "recomputation": (library.KEEP, library.RECOMPUTE),
    "codes": (library.KEEP, library.RECOMPUTE, "sketch", "pack"),
}


@dataclass(frozen=True, kw_only=True)
class ImagePlan(Origin):
    """One network with one budget. Peaks are bytes of a training process without an optimizer."""

    model: str  # title, with the batch
    method: str  # "exact", or what a plan may have: "recomputation", or "codes" as well
    budget: str = ""  # the share of what the exact peak has above the floor, or "least"
    memory: int | None = None  # the budget in bytes
    floor: int = 0  # bytes of parameters, buffers and gradients
    simulated: int | None = None  # peak of a simulated step
    measured: int | None = None  # peak of a real step, live bytes
    time: float | None = None  # median seconds of a step by those of the exact step in the same run
    seconds: float | None = None  # median seconds of a step
    noise: float | None = None  # variance that is added to the gradient, by the minibatch's own
    status: str = "ok"  # or that nothing fits, with the least that would
    plan: str = ""  # how many blocks have each option
    left: float | None = None  # of the exact network: bytes that convert leaves of those saved for the backward pass
    seed: int = fit_steps.SEED  # of the weights and the batch


def plans(title: str, made: Any, about: Mapping[str, Any], *, tiny: bool = False) -> list[ImagePlan]:
    """Measure a network exact, and with a plan for every budget and method, all in one run."""
    model, batch = made
    with library.quiet():
        explained = library.explain(models.twin(model), batch)
    runs: dict[str, fit_steps.Run] = {fit_steps.EXACT: fit_steps.step_of(model, batch)}
    rows: dict[str, ImagePlan] = {}
    for method, allow in METHODS.items():
        fitting = fit_steps.options_of(model, batch, allow=allow)
        static = fitting.static
        floor = static.parameters + static.buffers + static.gradients
        base = ImagePlan(model=title, method=method, floor=floor, **about)
        if not rows:
            peak = static.before_step + fit_steps.live_peak(model, runs[fit_steps.EXACT])
            left = explained.after / explained.before
            rows[fit_steps.EXACT] = dataclasses.replace(base, method=fit_steps.EXACT, measured=peak, left=left)
        budgets = {f"{share:g}": floor + int(share * (fitting.exact_peak - floor)) for share in SHARES}
        for budget, memory in ({LEAST: None} | budgets).items():
            key = f"{method} {budget}"
            here = dataclasses.replace(base, budget=budget, memory=memory)
            found = fit_steps.fitted(fitting, memory)
            if isinstance(found, str):
                rows[key] = dataclasses.replace(here, status=found)
                continue
            rows[key] = dataclasses.replace(
                here, simulated=found.simulated_peak, measured=found.measured_peak, noise=found.noise,
                plan=fit_steps.counts(found.plan.blocks),
            )  # fmt: skip
            runs[key] = fit_steps.step_of(found.plan.apply(models.twin(model)), batch)
    return fit_steps.with_times(rows, fit_steps.medians(model, runs, 1 if tiny else _ROUNDS))

"""What plans of fit cost at a few budgets, beside single methods on the same blocks: live bytes and seconds of steps.

The floor is what no plan can save: parameters, buffers, and gradients of all parameters that are trained. A budget is
the floor and a share of what the exact step's peak has above it.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks import library
from benchmarks.figures import BLUE, GREEN, LIGHT, ORANGE, PINK, RED, figure_of, headed, legend_of
from benchmarks.planning import fit_steps
from benchmarks.records import Origin
from benchmarks.suites import models

CHEN = "Chen et al., √n"
SHARES = (0.75, 0.5, 0.25, 0.12, 0.08)
# Single methods to the option that blocks have which can: all of these, or every other one.
SINGLE = {
    "recompute": library.RECOMPUTE,
    "selective": library.SELECTIVE,
    "sketch": "convert linears",
    "pack": "convert others",
    "convert tenth": "convert tenth",
    "convert narrow": "convert narrow",
    "offload": library.OFFLOAD,
}
EVERY = {"all": 1, "half": 2}


@dataclass(frozen=True, kw_only=True)
class Fitted(Origin):
    """One model with one method. Peaks are bytes of a training process without an optimizer."""

    model: str  # title, with the batch
    method: str  # "exact", "fit", or a single method
    share: float | None = None  # for "fit": the budget, as a share of what the exact peak has above the floor
    memory: int | None = None  # the budget in bytes
    floor: int = 0  # bytes of parameters, buffers and gradients
    predicted: int | None = None  # peak by the sum that was solved
    simulated: int | None = None  # peak of a simulated step
    measured: int | None = None  # peak of a real step, live bytes
    predicted_error: float | None = None  # of the predicted by the measured peak, %
    simulated_error: float | None = None  # of the simulated by the measured peak, %
    time: float | None = None  # median seconds of a step by those of the exact step in the same run
    predicted_time: float | None = None  # the same by the times of blocks
    seconds: float | None = None  # median seconds of a step
    # variance that is added to the gradient, by the minibatch's own; empty if it is not known
    noise: float | None = None
    within: str = "yes"  # whether the noise of every layer is within the limit of the plans: "yes" or "no"
    status: str = "ok"  # for "fit": "fits", "exceeds", or "cannot fit" with the least; "ok" for others
    rival: str = ""  # for "fit": the fastest single method whose measured peak is within the budget
    rival_time: float | None = None  # its time by the exact step's
    plan: str = ""  # how many blocks have each option
    seed: int = fit_steps.SEED  # of the weights and the batch


def frontier(title: str, made: fit_steps.Made, about: Mapping[str, Any], *, tiny: bool = False) -> list[Fitted]:
    """Measure a model exact, with every single method, and with a plan for every budget, all in one run."""
    model, batch = made
    with tempfile.TemporaryDirectory() as folder:
        fitting = fit_steps.options_of(model, batch, folder)
        static = fitting.static
        floor, before = static.parameters + static.buffers + static.gradients, static.before_step
        base = Fitted(model=title, method=fit_steps.EXACT, floor=floor, **about)
        runs: dict[str, fit_steps.Run] = {fit_steps.EXACT: fit_steps.step_of(model, batch)}
        plain = fit_steps.counts(blocks[0] for blocks in fitting.proposals.rows)
        rows = {fit_steps.EXACT: dataclasses.replace(base, plan=plain)}
        for method, row, run in _single(fitting, base):
            rows[method], runs[method] = row, run
        for method, run in runs.items():
            rows[method] = dataclasses.replace(rows[method], measured=before + fit_steps.live_peak(model, run))
        for share in SHARES[1::3] if tiny else SHARES:
            key, memory = f"{fit_steps.FIT} {share}", floor + int(share * (fitting.exact_peak - floor))
            here = dataclasses.replace(base, method=fit_steps.FIT, share=share, memory=memory)
            found = fit_steps.fitted(fitting, memory)
            if isinstance(found, str):
                rows[key] = dataclasses.replace(here, status=found)
            else:
                rows[key] = _reported(here, found)
                runs[key] = fit_steps.step_of(found.plan.apply(models.twin(model)), batch)
        seconds = fit_steps.medians(model, runs, 1 if tiny else fit_steps.ROUNDS)
        del runs
    timed = fit_steps.with_times(rows, seconds)
    return [_with_rival(row, timed) for row in timed]


def _single(fitting: library.Fitting, base: Fitted) -> Iterator[tuple[str, Fitted, fit_steps.Run]]:
    for (name, option), (part, step) in itertools.product(SINGLE.items(), EVERY.items()):
        every = _blocks(fitting, option)
        able = [place for place, block in enumerate(every) if block.choice != library.KEEP]
        if not able:
            continue
        blocks = [
            block if place in able[::step] else rows[0]
            for place, (block, rows) in enumerate(zip(every, fitting.proposals.rows, strict=True))
        ]
        plan = fitting.proposals.plan_of(blocks)
        model = plan.apply(models.twin(fitting.model))
        # What is left out for its noise was neither timed for the plan nor is its noise kept.
        is_known = all(block.kept or block.worst for block in blocks)
        row = dataclasses.replace(
            base, method=f"{name} {part}", predicted_time=1 + plan.seconds / fitting.candidates.seconds if is_known
            else None, noise=sum(block.noise for block in blocks) if is_known else None, within="yes" if is_known else
            "no", plan=fit_steps.counts(blocks),
        )  # fmt: skip
        yield row.method, row, fit_steps.step_of(model, fitting.example)
    segments: nn.Module = models.twin(fitting.model)
    fit_steps.recompute_segments(segments)
    yield CHEN, dataclasses.replace(base, method=CHEN, noise=0.0), fit_steps.step_of(segments, fitting.example)


def _blocks(fitting: library.Fitting, option: str) -> list[library.PlannedBlock]:
    """The blocks with one option, wherever they have it, with its noise and seconds where these are known."""
    choice, _, name = option.partition(" ")
    if choice != library.CONVERT:
        return [
            next((row for row in rows if row.option == option and row.choice == choice), rows[0])
            for rows in fitting.proposals.rows
        ]
    setting = next(one for one in library.SETTINGS if one.name == name)
    found = list[library.PlannedBlock]()
    for rows in fitting.proposals.rows:
        block = rows[0].name
        does = _does(fitting, block, setting)
        # Of settings that do the same in a block, the first has the row.
        same = next((one.name for one in library.SETTINGS if _does(fitting, block, one) == does), name)
        left_out = library.PlannedBlock(block, library.CONVERT, setting=name)
        found.append(next((row for row in rows if row.setting == same), left_out) if does else rows[0])
    return found


def _does(fitting: library.Fitting, block: str, setting: library.Setting) -> dict[str, Any]:
    chosen = fitting.candidates.conversions.chosen(block, setting)
    return {name: setting.fields[operation] for name, operation in chosen.items()}


def _reported(row: Fitted, report: library.FitReport) -> Fitted:
    measured = report.peak
    return dataclasses.replace(
        row, predicted=report.predicted_peak, simulated=report.simulated_peak, measured=measured, predicted_error=100
        * (report.predicted_peak / measured - 1), simulated_error=100 * (report.simulated_peak / measured - 1),
        predicted_time=report.time, noise=report.noise, status="fits" if report.fits else "exceeds",
        plan=fit_steps.counts(report.plan.blocks),
    )  # fmt: skip


def _with_rival(row: Fitted, rows: Sequence[Fitted]) -> Fitted:
    """Add the fastest single method within the budget."""
    if row.memory is None:
        return row
    single = [one for one in rows if one.method not in (fit_steps.EXACT, fit_steps.FIT)]
    single = [one for one in single if (one.measured or 0) <= row.memory]
    best = min(single, key=lambda one: one.time or 0.0, default=None)
    return row if best is None else dataclasses.replace(row, rival=best.method, rival_time=best.time)


_STYLES = {
    "recompute": ("s", BLUE),
    "selective": ("D", LIGHT),
    "sketch": ("^", RED),
    "pack": ("v", ORANGE),
    "convert tenth": ("P", PINK),
    "convert narrow": ("X", PINK),
    "offload": ("<", "#555555"),
    CHEN: ("*", GREEN),
}


def plot(rows: Sequence[Fitted]) -> Any:
    titles = list(dict.fromkeys(row.model for row in rows))
    across = min(3, len(titles))
    figure, axes = figure_of(-(-len(titles) // across), across)
    for model, axis in zip(titles, axes, strict=False):
        _panel(axis, [row for row in rows if row.model == model and row.measured is not None])
        axis.set(title=model, xlabel="peak above the floor, MB", ylabel="time relative to exact")
    for axis in axes[len(titles) :]:
        axis.set_axis_off()
    legend_of(figure, axes, ncols=5)
    return headed(figure, "Time and memory of plans", rows)


def _panel(axis: Any, rows: Sequence[Fitted]) -> None:
    def points(chosen: Sequence[Fitted]) -> tuple[list[float], list[float]]:
        ordered = sorted(chosen, key=lambda row: row.measured or 0)
        return [((row.measured or 0) - row.floor) / 1e6 for row in ordered], [row.time or 0.0 for row in ordered]

    ours = [row for row in rows if row.method in (fit_steps.EXACT, fit_steps.FIT)]
    axis.plot(*points(ours), color="black", marker="o", markersize=5, label="fit")
    exact = [row for row in rows if row.method == fit_steps.EXACT]
    for method, (marker, color) in _STYLES.items():
        here = [row for row in rows if row.method in (method, f"{method} half", f"{method} all")]
        if here:
            axis.plot(*points([*exact, *here]), color=color, linewidth=0.8, alpha=0.6)
        for row in here:
            filled = {"markerfacecolor": color if row.within == "yes" else "none"}
            axis.plot(*points([row]), linestyle="", marker=marker, color=color, markersize=7, label=method, **filled)
    axis.set_xlim(left=0)
    axis.grid(color="0.9", linewidth=0.6)

"""The tables of ``docs/planning/fit.md``, from the csv files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.fit_rows import EXACT, FIT, Fitted, Neighbour, Solved
from benchmarks.records import Origin, read_rows
from rmm_linear._support.tables import table

_ERROR = 3.0  # %, that a predicted peak may be from the measured one


def page(results: Path) -> str:
    """Make the tables.

    Args:
        results: Folder of the csv files.

    Returns:
        A section for every part that was measured.
    """
    frontier, beside, solved = (results / f"fit-{part}.csv" for part in ("frontier", "neighbours", "solvers"))
    parts: list[str] = []
    if frontier.is_file():
        parts += _frontier(read_rows(frontier, Fitted))
    if beside.is_file():
        rows = read_rows(beside, Neighbour)
        parts += ["### Beside PyTorch's own", _NEIGHBOURS, neighbours(rows), _origin(rows)]
    if solved.is_file():
        found = read_rows(solved, Solved)
        parts += ["### Solvers", _SOLVERS, solvers(found), _origin(found)]
    return "\n\n".join(parts) or "Nothing is measured yet: run `python -m benchmarks fit`."


def plans(rows: Sequence[Fitted]) -> str:
    """Make the table of plans.

    Args:
        rows: Of one model or more.

    Returns:
        A line per budget.
    """
    header = (
        "model", "budget", "MB", "predicted", "simulated", "measured", "time", "predicted", "noise",
        "best single method", "plan",
    )  # fmt: skip
    lines = []
    for row in rows:
        if row.method != FIT:
            continue
        begin = (row.model, f"{row.share:g}", _megabytes(row.memory))
        if row.measured is None:
            lines.append((*begin, "", "", "", "", "", "", _rival(row, rows), row.status))
            continue
        peaks = (_with_error(row.predicted, row.predicted_error), _with_error(row.simulated, row.simulated_error))
        fits = "" if row.status == "fits" else f" {row.status}"
        cost = (_number(row.time), _number(row.predicted_time), _noise(row.noise))
        lines.append((*begin, *peaks, f"{_megabytes(row.measured)}{fits}", *cost, _rival(row, rows), row.plan))
    return table(header, lines)


def single_methods(rows: Sequence[Fitted]) -> str:
    """Make the table of single methods.

    Args:
        rows: Of one model or more.

    Returns:
        A line per method, with the exact step.
    """
    lines = [
        (row.model, row.method, _megabytes(row.measured), _number(row.time), _noise(row.noise), _limit(row))
        for row in rows
        if row.method != FIT
    ]
    return table(("model", "method", "measured, MB", "time", "noise", "within the limit"), lines)


def neighbours(rows: Sequence[Neighbour]) -> str:
    """Make the table of PyTorch's methods and of plans for their peaks.

    Args:
        rows: Of one model or more.

    Returns:
        A line per method.
    """
    header = ("model", "method", "live, MB", "allocated, MB", "time", "fit: live", "allocated", "time", "noise", "plan")
    lines = []
    for row in rows:
        if row.method == FIT:
            continue
        ours = next((one for one in rows if one.model == row.model and one.beside == row.method), None)
        cells = ("",) * 5
        if ours is not None:
            sizes = (_megabytes(ours.live), _megabytes(ours.allocated))
            cells = (*sizes, _number(ours.time), _noise(ours.noise), ours.plan if ours.live else ours.status)
        failed = "" if row.status == "ok" else f": {row.status}"
        there = (_megabytes(row.live), _megabytes(row.allocated), _number(row.time))
        lines.append((row.model, f"{row.method}{failed}", *there, *cells))
    return table(header, lines)


def solvers(rows: Sequence[Solved]) -> str:
    """Make the table of solvers.

    Args:
        rows: All of them.

    Returns:
        A line per number of blocks and budget.
    """
    names = list(dict.fromkeys(row.solver for row in rows))
    header = ["blocks", "budget", *(f"{name}: cost (seconds)" for name in names)]
    lines = []
    for blocks, budget in dict.fromkeys((row.blocks, row.budget) for row in rows):
        here = {row.solver: row for row in rows if (row.blocks, row.budget) == (blocks, budget)}
        cells = [
            f"{here[name].cost:.4f} ({here[name].seconds:.3g})" if here[name].cost is not None else "nothing fits"
            for name in names
        ]
        lines.append((str(blocks), f"{budget:g}", *cells))
    return table(header, lines)


def _frontier(rows: Sequence[Fitted]) -> list[str]:
    return [
        "### Within a budget",
        "The floor is what no plan can save: parameters, buffers and the gradients of all trained parameters. A budget "
        "is the floor and a share of what the exact step's peak has above it. Peaks are live bytes of the whole "
        "process without an optimizer, with the error of the prediction by the sum that is solved and of the "
        "simulated step; times are medians of real steps by the exact step's, all in one run; the predicted time is "
        "that of the blocks one by one. The best single method is the fastest whose measured peak is within the "
        "budget. Offloaded blocks write files into a temporary folder, which the system may hold in its page cache.",
        plans(rows),
        _claims(rows),
        "![Time of a step against its peak, plans and single methods](../../benchmarks/results/fit-frontier.png)",
        "Single methods, on all blocks that can have them or on every other one. Outside of the limit the noise of a "
        "layer exceeds the minibatch's own, which plans are not allowed; such methods are marked † above and hollow in "
        "the picture:",
        single_methods(rows),
        _origin(rows),
    ]


def _claims(rows: Sequence[Fitted]) -> str:
    """What the plans show, counted."""
    found = [row for row in rows if row.method == FIT]
    made = [row for row in found if row.measured is not None]
    errors = [abs(row.predicted_error or 0.0) for row in made]
    rivals = [row for row in made if row.rival_time is not None]
    faster = [row for row in rivals if (row.time or 0.0) <= (row.rival_time or 0.0)]
    allowed = [(row, best) for row in made if (best := _allowed(row, rows)) is not None]
    quicker = [row for row, best in allowed if (row.time or 0.0) <= best]
    least = [row for row in found if row.measured is None]
    missed = [row for row in least if row.rival and _limit_of(row, rows) == "yes"]
    return (
        f"{sum(row.status == 'fits' for row in made)} of {len(made)} plans are within their budget, "
        f"{sum(error <= _ERROR for error in errors)} were predicted within {_ERROR:g} % "
        f"(at most {max(errors, default=0.0):.1f} %). {len(faster)} of the {len(rivals)} for whose budget there is a "
        f"single method are no slower than the fastest of these, {len(quicker)} of {len(allowed)} than the fastest "
        f"whose noise is within the limit. {len(least)} budgets cannot be met; in {len(missed)} of "
        "them a single method within the limit of the noise does."
    )


def _allowed(plan: Fitted, rows: Sequence[Fitted]) -> float | None:
    """The least time of a single method that is within a plan's budget, and within the limit of the noise."""
    methods = [row for row in rows if row.model == plan.model and row.method not in (EXACT, FIT)]
    times = [row.time for row in methods if row.within == "yes" and (row.measured or 0) <= (plan.memory or 0)]
    return min((time for time in times if time is not None), default=None)


def _limit_of(row: Fitted, rows: Sequence[Fitted]) -> str:
    return next((one.within for one in rows if (one.model, one.method) == (row.model, row.rival)), "")


def _rival(row: Fitted, rows: Sequence[Fitted]) -> str:
    if not row.rival:
        return "none"
    return f"{row.rival}{'' if _limit_of(row, rows) == 'yes' else ' †'}, {_number(row.rival_time)}"


def _limit(row: Fitted) -> str:
    return "" if row.method == EXACT else row.within


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.1f}"


def _with_error(size: int | None, error: float | None) -> str:
    return f"{_megabytes(size)} ({error or 0.0:+.1f} %)".replace("-", "−")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _noise(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _origin(rows: Sequence[Origin]) -> str:
    about = rows[0]
    commits = ", ".join(f"`{commit[:12]}`" for commit in dict.fromkeys(row.commit for row in rows))
    threads = f"{about.threads} thread{'s' if about.threads != 1 else ''}"
    return (
        f"Measured on {about.machine}, {threads}, PyTorch {about.torch}, transformers {about.transformers}, commit "
        f"{commits}, {max(row.date for row in rows)[:10]}, by `python -m benchmarks fit`."
    )


_NEIGHBOURS = (
    "Each of PyTorch's methods, and a plan whose budget is that method's peak, all in one run. Live bytes are those of "
    "tensors; a compiled step is not followed, so its budget is the exact step's live bytes, less by what the "
    "allocator's peak is lower. `save_on_cpu` is for accelerators: on the CPU its copies are in the same memory and "
    "count, parameters among them, so its peak is above the exact one and there is nothing to fit. Plans have no "
    "folder to offload to:"
)
_SOLVERS = (
    "Synthetic blocks with seven options each: what a plan costs, time and noise, by the least that any solver found, "
    "and the seconds to solve. The integer program stops after 20 seconds; `auto` is it where scipy is installed, else "
    "the rounded dynamic program:"
)

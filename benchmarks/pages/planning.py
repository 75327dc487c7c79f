"""The tables of the pages about planning: chains, graphs, fit, and sizes on paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from types import MappingProxyType

from benchmarks.library import CONVERT, SETTINGS, label_of, table
from benchmarks.noise.shapes import Shape
from benchmarks.pages.render import Cell, Table, columns, from_csv, megabytes, number, of, pivot
from benchmarks.planning.chains import Run
from benchmarks.planning.compiled import BUDGETS, LEAST, SAME_SHARE, THEIR_PEAK, TORCH, Compiled
from benchmarks.planning.fit import Solved
from benchmarks.planning.fit_frontier import Fitted
from benchmarks.planning.fit_images import METHODS as OF_IMAGES
from benchmarks.planning.fit_images import ImagePlan
from benchmarks.planning.fit_paper import METHODS, Paper
from benchmarks.planning.fit_steps import EXACT, FIT
from benchmarks.planning.graphs import METHODS as GRAPH_METHODS
from benchmarks.planning.graphs import Planned
from benchmarks.planning.networks import PUBLISHED

_PLANNED = [*OF_IMAGES]
_ERROR = 3.0  # %, that a predicted peak may be from the measured one
_CHAINS = {
    "cell": of("cell"),
    "policy": of("policy"),
    "budget": of("budget"),
    "forward steps, planned": of("planned_steps", ","),
    "run": of("counted_steps", ","),
    "time": of("time_ratio", ".3f"),
    "bytes without outputs": of("recurrent_bytes", ","),
    "relative to plain": of("share", ".1%"),
    "gradients": of("gradients"),
}


def _networks(rows: Sequence[Planned]) -> list[dict[str, Planned]]:
    return [{row.method: row for row in group} for _, group in groupby(rows, key=lambda row: row.network)]


def _less(row: Planned, plain: Planned) -> str:
    return number(100 * (row.predicted / plain.predicted - 1), ".1f") + " %"


def _graph_plans(cell: Callable[[Planned, Planned], str]) -> dict[str, Cell]:
    titles = dict(zip(GRAPH_METHODS, ("ours (operations)", "Chen et al.", "Kusumoto et al."), strict=True))
    return {title: lambda rows, method=method: cell(rows[method], rows["plain"]) for method, title in titles.items()}


def _with_operations(row: Planned, plain: Planned) -> str:
    return f"{_less(row, plain)} (× {row.flops:.2f})"


def _graphs_real(rows: Sequence[Planned]) -> str:
    spec: dict[str, Cell] = {
        "network": lambda rows: rows["plain"].network,
        "plain": lambda rows: f"{rows['plain'].predicted / 1e6:,.1f}",
        **_graph_plans(lambda row, plain: f"{row.predicted / 1e6:,.1f}, {_with_operations(row, plain)}"),
        "allocated": lambda rows: megabytes("allocated")(rows["cuts"]),
        "predicted": lambda rows: megabytes("with_workspace")(rows["cuts"]),
    }
    return columns(_networks(rows), spec)


def _graphs_paper(rows: Sequence[Planned]) -> str:
    def published(rows: Mapping[str, Planned]) -> str:
        program, chen, before = PUBLISHED[rows["plain"].network]
        return ", ".join(f"{number(100 * (one / before - 1), '.0f')} %" for one in (program, chen))

    spec: dict[str, Cell] = {
        "network, batch": lambda rows: rows["plain"].network,
        "plain": lambda rows: f"{rows['plain'].predicted / 1e9:.2f}",
        **_graph_plans(_with_operations),
        "published: theirs, Chen": published,
    }
    return columns(_networks(rows), spec)


def _graphs_order(rows: Sequence[Planned]) -> str:
    spec: dict[str, Cell] = {
        "network": lambda rows: rows["plain"].network,
        "alone": lambda rows: _less(rows["order"], rows["plain"]),
        "after recomputation": lambda rows: _less(rows["cuts and order"], rows["cuts"]),
    }
    return columns(_networks(rows), spec)


def _budgets(rows: Sequence[Compiled]) -> str:
    def cell(solver: str) -> Cell:
        return lambda found: f"{found[solver].peak / 1e6:,.1f} ({found[solver].work:.3f})"

    groups = groupby([row for row in rows if row.solver != LEAST], key=lambda row: (row.network, row.budget))
    spec: dict[str, Cell] = {
        "decoder": lambda found: found[SAME_SHARE].network,
        "budget": lambda found: f"{found[SAME_SHARE].budget:g}",
        "torch, MB": cell(TORCH),
        "same share": cell(SAME_SHARE),
        "their peak": cell(THEIR_PEAK),
    }
    return columns([{row.solver: row for row in group} for _, group in groups], spec)


def _budget_claims(rows: Sequence[Compiled]) -> str:
    lines = []
    for title, group in groupby(rows, key=lambda row: row.network):
        found = [*group]
        peaks = {solver: [row.peak for row in found if row.solver == solver] for solver in (TORCH, SAME_SHARE, LEAST)}
        times = {solver: sorted(_times(found, solver)) for solver in (THEIR_PEAK, SAME_SHARE)}
        median, most = ({solver: each[place] for solver, each in times.items()} for place in (len(BUDGETS) // 2, -1))
        of_torch = [row for row in found if row.solver == TORCH]
        least, theirs = (min(each, key=lambda row: row.peak) for each in (found, of_torch))
        lines.append(
            f"- {title}: torch's peak rises {_rises(peaks[TORCH])} times as the budget falls, ours "
            f"{_rises(peaks[SAME_SHARE])} times. The least is {least.peak / 1e6:,.1f} MB at {least.work:.2f} times the "
            f"work, torch's {theirs.peak / 1e6:,.1f} at {theirs.work:.2f}. Without a code generator, which takes "
            f"longer than all of it, compiling with their peaks as budgets takes {median[THEIR_PEAK]:.1f} times the "
            f"processor time of torch's, {most[THEIR_PEAK]:.1f} at most; with the same shares "
            f"{median[SAME_SHARE]:.1f}, {most[SAME_SHARE]:.1f} at most. Gradients are equal to the bit in "
            f"{sum(row.is_equal == 'equal' for row in found)} of {len(found)} rows."
        )
    return "\n".join(lines)


def _times(rows: Sequence[Compiled], solver: str) -> list[float]:
    """Seconds of compiling with a solver, by torch's with the same budget."""
    found = ([row for row in rows if row.solver == each] for each in (TORCH, solver))
    return [ours.seconds / theirs.seconds for theirs, ours in zip(*found, strict=True)]


def _rises(peaks: Sequence[int]) -> int:
    return sum(after > before for before, after in pairwise(peaks))


def _with_error(peak: str) -> Cell:
    """Return the cell of a predicted peak and its error."""
    error = of(f"{peak}_error", "+.1f")
    return lambda row: "" if getattr(row, peak) is None else f"{megabytes(peak)(row)} ({error(row) or '+0.0'} %)"


def _plans(rows: Sequence[Fitted]) -> str:
    """Lay out a line per budget; † marks rivals with more noise than plans may have."""
    within = {(row.model, row.method): row.within for row in rows}

    def rival(row: Fitted) -> str:
        mark = " †" * (within.get((row.model, row.rival)) != "yes")
        return f"{_worded(row.rival, _MEASURED)}{mark}, {number(row.rival_time, '.3f')}" if row.rival else "none"

    def least(found: re.Match[str]) -> str:
        return f"cannot fit below {number(int(found[1]), ',.1f', 1e-6)} MB"

    spec: dict[str, Cell] = {
        "model": of("model"),
        "budget": of("share", "g"),
        "MB": megabytes("memory"),
        "predicted": _with_error("predicted"),
        "simulated": _with_error("simulated"),
        "measured": lambda row: (
            megabytes("measured")(row) + f" {row.status}" * (row.status != "fits" and bool(row.measured))
        ),
        "time": of("time", ".3f"),
        "predicted time": of("predicted_time", ".3f"),
        "variance ratio": of("noise", ".2g"),
        "best single method": rival,
        "plan": lambda row: _worded(row.plan, _MEASURED) or re.sub(r".*the least is (\d+) bytes.*", least, row.status),
    }
    return columns((row for row in rows if row.method == FIT), spec)


def _worded(text: str, measured: Mapping[str, str] = MappingProxyType({})) -> str:
    """Write settings as reports do: csv files have their keys."""
    for setting in SETTINGS:
        key = f"{CONVERT} {setting.name}"
        first, _, rest = label_of(key).partition(", ")
        rest = measured.get(setting.name, rest)
        text = text.replace(key, f"{first} ({rest})" if rest else first)
    return text


_MEASURED = {"tenth": "10 %", "narrow": "5 %"}  # of fit-frontier.csv; the settings have moved on


def _methods(rows: Sequence[Fitted]) -> str:
    spec: dict[str, Cell] = {
        "model": of("model"),
        "method": lambda row: _worded(row.method, _MEASURED),
        "measured, MB": megabytes("measured"),
        "time": of("time", ".3f"),
        "variance ratio": of("noise", ".2g"),
        "within the limit": lambda row: "" if row.method == EXACT else row.within,
    }
    return columns((row for row in rows if row.method != FIT), spec)


def _fit_claims(rows: Sequence[Fitted]) -> str:
    """Count what the plans show."""
    found = [row for row in rows if row.method == FIT]
    made = [row for row in found if row.measured is not None]
    least = [row for row in found if row.measured is None]
    errors = [abs(row.predicted_error or 0.0) for row in made]
    rivals = [(row, row.rival_time) for row in made if row.rival_time is not None]
    methods = [row for row in rows if row.method not in (EXACT, FIT) and row.within == "yes" and row.time is not None]
    allowed = list[tuple[Fitted, float]]()
    for row in made:
        here = [one for one in methods if one.model == row.model and (one.measured or 0) <= (row.memory or 0)]
        allowed += [(row, min(one.time or 0.0 for one in here))] if here else []

    def no_slower(compared: Sequence[tuple[Fitted, float]]) -> str:
        return f"{sum((row.time or 0.0) <= time for row, time in compared)} of {len(compared)}"

    within = {(row.model, row.method): row.within for row in rows}
    missed = sum(within.get((row.model, row.rival)) == "yes" for row in least)
    lines = {
        "within their budget": f"{sum(row.status == 'fits' for row in made)} of {len(made)}",
        f"peak predicted within {_ERROR:g} % (largest error: {max(errors, default=0.0):.1f} %)": (
            f"{sum(error <= _ERROR for error in errors)} of {len(made)}"
        ),
        "no slower than the fastest single method within the budget": no_slower(rivals),
        "no slower than the fastest of those within the limit of the noise": no_slower(allowed),
        "budgets that no plan meets": str(len(least)),
        "of these, met by a single method within the limit of the noise": str(missed),
    }
    return table(("plans", "count"), list(lines.items()))


def _images(rows: Sequence[ImagePlan]) -> str:
    """Lay out a line per budget, after that of the exact network."""
    lines = list[dict[str, ImagePlan]]()
    for _, group in groupby(rows, key=lambda row: row.model):
        here = {(row.method, row.budget): row for row in group}
        budgets = dict.fromkeys(budget for _, budget in here)
        lines += [{one: here[one, budget] for one in (EXACT, *_PLANNED) if (one, budget) in here} for budget in budgets]

    def first(cell: Cell) -> Cell:
        return lambda line: cell(next(iter(line.values())))

    def plan(method: str, cell: Cell) -> Cell:
        return lambda line: cell(line[method]) if method in line else ""

    def peak(row: ImagePlan) -> str:
        least = re.search(r"the least is (\d+) bytes", row.status)
        return f"above {number(int(least[1]), ',.1f', 1e-6)}" if least else megabytes("measured")(row)

    codes = _PLANNED[-1]
    spec: dict[str, Cell] = {
        "network": first(of("model")),
        "budget": first(lambda row: row.budget or EXACT),
        "MB": first(lambda row: megabytes("measured" if row.method == EXACT else "memory")(row)),
        **{
            f"{method}: {title}": plan(method, cell)
            for method in _PLANNED
            for title, cell in (("measured", peak), ("time", of("time", ".3f")))
        },
        "variance ratio": plan(codes, of("noise", ".2g")),
        "bytes that `convert` leaves": first(lambda row: "" if row.left is None else f"{100 * row.left:.0f} %"),
        "plan with codes": plan(codes, lambda row: _worded(row.plan)),
    }
    return columns(lines, spec)


def _shapes(rows: Sequence[Shape]) -> str:
    """Lay out shapes and methods down, what is measured of each dtype across, ± half the range of the middle half."""
    cells = {(row.case, row.method, row.dtype): row for row in rows}

    def of_dtype(dtype: str, cell: Cell) -> Cell:
        return lambda key: cell(cells[(*key, dtype)]) if (*key, dtype) in cells else ""

    def share(name: str) -> Cell:
        def text(row: Shape) -> str:
            exact, value = getattr(cells[row.case, EXACT, row.dtype], name), getattr(row, name)
            if value is None:
                return row.status.partition(":")[0]
            return f"{value / 1e6:,.0f} MB" if row.method == EXACT else f"{100 * value / exact:.0f} %"

        return text

    def time(row: Shape) -> str:
        if row.seconds is None or row.time is None or row.lower is None or row.upper is None:
            return ""
        spread = (row.upper - row.lower) / 2 / row.seconds
        return f"{row.seconds:.2f} s" if row.method == EXACT else f"{row.time:.2f} ± {spread * row.time:.2f}"

    spec: dict[str, Cell] = {"shape": lambda key: key[0], "method": lambda key: key[1]}
    for dtype in dict.fromkeys(row.dtype for row in rows):
        spec |= {
            f"{dtype}: kept": of_dtype(dtype, share("kept")),
            f"{dtype}: in files": of_dtype(dtype, lambda row: f"{row.host / 1e6:,.0f} MB" if row.host else ""),
            f"{dtype}: peak": of_dtype(dtype, share("peak")),
            f"{dtype}: step": of_dtype(dtype, time),
        }
    return columns(dict.fromkeys((row.case, row.method) for row in rows), spec)


def _solvers(rows: Sequence[Solved]) -> str:
    def cell(row: Solved) -> str:
        return "nothing fits" if row.cost is None else f"{row.cost:.4f} ({row.seconds:.3g})"

    title: Cell = lambda row: f"{row.blocks} blocks, {row.budget:g}"  # noqa: E731
    return pivot(rows, title, lambda row: f"{row.solver}: cost (seconds)", cell, corner="budget")


def _cases(rows: Sequence[Paper]) -> list[dict[str, Paper]]:
    found: dict[tuple[str, str, str], dict[str, Paper]] = {}
    for row in rows:
        found.setdefault((row.model, row.place, row.trained), {})[row.method] = row
    return list(found.values())


_CASE: dict[str, Cell] = {
    "devices": lambda case: case["exact"].place,
    "trained": lambda case: {"all": "all weights, AdamW", "LoRA": "LoRA"}[case["exact"].trained],
}


def _needed(cases: Sequence[Mapping[str, Paper]]) -> str:
    fields = {name: name for name in ("parameters", "gradients", "optimizer", "gathered")}
    fields |= {"together": "needed", "without `fused=True`, more": "transient"}

    def size(name: str) -> Cell:
        return lambda case: number(getattr(case["exact"], name) or None, ".1f", 1e-9)

    return columns(cases, _CASE | {title: size(name) for title, name in fields.items()})


def _sequences(cases: Sequence[Mapping[str, Paper]]) -> str:
    """Lay out the longest sequence of every method, and the tokens of a step of all devices where these are more."""

    def of_method(method: str) -> Cell:
        def cell(case: Mapping[str, Paper]) -> str:
            row = case[method]
            if row.status != "ok":
                return row.status
            together = f" ({row.tokens:,})" if row.tokens > row.sequence else ""
            return f"{row.sequence:,}{together}" if row.sequence else "none"

        return cell

    titles = {method: "checkpointed, loss in chunks" if method == "chunked" else method for method in METHODS}
    spec = _CASE | {title: of_method(method) for method, title in titles.items()}
    return columns(cases, spec | {"fitted, GB on the host": lambda case: number(case["fitted"].host, ".0f", 1e-9)})


def _paper_plans(cases: Sequence[Mapping[str, Paper]]) -> str:
    spec = _CASE | {"blocks": lambda case: _worded(case["fitted"].plan)}
    return columns([case for case in cases if case["fitted"].plan], spec)


def _paper_claims(rows: Sequence[Paper]) -> str:
    """Compare the longest sequences of the cases that fit at all."""
    fitting = [case for case in _cases(rows) if case["exact"].status == "ok"]
    titles = {"packed": "packing all blocks", "fitted": "the fitted plan"}
    lines = []
    for ours, title in titles.items():
        for theirs, other in (("checkpointed", "recomputing all blocks"), ("chunked", "the same, loss in chunks")):
            ratios = [case[ours].sequence / case[theirs].sequence for case in fitting if case[theirs].sequence]
            longer, shorter = sum(one > 1 for one in ratios), sum(one < 1 for one in ratios)
            span = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
            lines.append((title, other, span, str(longer), str(shorter), str(len(ratios))))
    return table(("longest sequence of", "relative to that of", "ratio", "longer", "shorter", "cases"), lines)


def _of_model(model: str, make: Callable[[Sequence[Mapping[str, Paper]]], str]) -> Table:
    return from_csv("fit-paper", Paper, lambda rows: make(_cases([row for row in rows if row.model == model])))


TABLES: dict[str, Table] = {
    "chains-bptt": from_csv("chains-bptt", Run, lambda rows: columns(rows, _CHAINS)),
    "graphs-real": from_csv("graphs-real", Planned, _graphs_real),
    "graphs-paper": from_csv("graphs-paper", Planned, _graphs_paper),
    "graphs-order": from_csv("graphs-order", Planned, _graphs_order),
    "graphs-compiled": from_csv("graphs-compiled", Compiled, _budgets),
    "graphs-compiled-claims": from_csv("graphs-compiled", Compiled, _budget_claims),
    "fit-frontier": from_csv("fit-frontier", Fitted, _plans),
    "fit-methods": from_csv("fit-frontier", Fitted, _methods),
    "fit-claims": from_csv("fit-frontier", Fitted, _fit_claims),
    "fit-images": from_csv("fit-images", ImagePlan, _images),
    "shapes": from_csv("shapes", Shape, _shapes),
    "fit-solvers": from_csv("fit-solvers", Solved, _solvers),
    "fit-paper-claims": from_csv("fit-paper", Paper, _paper_claims),
    **{
        f"fit-paper-{model}-{part}": _of_model(model, make)
        for model in ("8b", "70b")
        for part, make in {
            "needed": _needed,
            "sequences": _sequences,
            "plans": _paper_plans,
        }.items()
    },
}

"""The tables of README and ``docs/comparison.md``: what methods that save memory cost in training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.frontier import aggregate as compared
from benchmarks.frontier.aggregate import TITLES, loss_text, mean_text, score_text, share_of, share_text
from benchmarks.frontier.methods import EXACT, METHODS
from benchmarks.frontier.rows import Cost, Epoch
from benchmarks.frontier.shares import REST, WORDS, Share
from benchmarks.library import table
from benchmarks.pages.render import Cell, Table, columns, from_csv
from benchmarks.records import read_rows

_README = {
    EXACT: "exact",
    "checkpoint": "checkpointing",
    "checkpoint-offload": "checkpointing, offloaded",
    "tenth": "**ours**",
    "lora-tenth": "ours + LoRA",
    "fit-25": "fit",
}
_SUMMARY = (
    EXACT, "checkpoint", "checkpoint-offload", "careful", "tenth", "smallest", "fit-25", "gact", "fp8", "prac-4",
    "prac-60", "few-bits", "lora", "loract", "gaussian-50", "gaussian-10",
)  # fmt: skip
_FIELDS = {
    "saved by autograd": "saved",
    "activation memory": "kept",
    "in files": "host",
    "peak": "peak",
    "RSS": "rss",
    "step time": "time",
    "step time, 32 rows": "trained_time",
}
_ALL_ROWS = "sst2-full"


class _Measured:
    """What was measured on the tasks that are comparable; cells of a method."""

    def __init__(self, results: Path, end: str = "") -> None:
        """Read them; ``end`` is how the names of the tasks end."""
        self.every = read_rows(results / "frontier-accuracy.csv", Epoch)
        costs = read_rows(results / "frontier-cost.csv", Cost)
        self.tasks = compared.tasks_of(self.every, costs, end)
        self.costs = [row for row in costs if row.task in self.tasks]
        self.epochs = compared.comparable(self.every, self.costs)
        self.together, self.apart = compared.together_and_apart(self.tasks)

    def of(self, methods: Iterable[str]) -> list[str]:
        """Return those of some methods whose costs are known."""
        return [name for name in methods if any(row.method == name for row in self.costs)]

    def shares(self, *titles: str) -> dict[str, Cell]:
        """Return columns of bytes and times relative to exact; bytes elsewhere have one if a method has such."""
        is_any = any(row.host is not None for row in self.costs)

        def cell(field: str) -> Cell:
            return lambda method: share_text(share_of(self.costs, self.tasks, method, field), field)

        return {title: cell(_FIELDS[title]) for title in titles if is_any or _FIELDS[title] != "host"}

    def difference(
        self, text: Callable[[Sequence[Epoch], Sequence[str], str], str], tasks: Sequence[str], exact: str = ""
    ) -> Cell:
        """Return the cell of a difference to the exact runs of the same seeds."""
        return lambda method: exact if METHODS[method].is_exact else text(self.epochs, tasks, method)

    def score(self, task: str, method: str) -> list[float]:
        """Return a method's scores, which are the exact ones where its gradients are exact."""
        return compared.scores_of(self.epochs, task, EXACT if METHODS[method].is_exact else method)


def _title(method: str) -> str:
    return METHODS[method].title


def _readme(results: Path) -> str:
    measured = _Measured(results)
    spec = {
        "": lambda method: _README[method],
        **measured.shares("activation memory", "in files", "peak", "step time"),
        "score, difference to exact": measured.difference(score_text, measured.together, "0"),
    }
    return columns(measured.of(_README), spec)


def _summary(results: Path, end: str = "") -> str:
    measured = _Measured(results, end)
    if not measured.costs:
        return "Not measured yet."
    spec = {
        "": lambda method: f"**{_title(method)}**" if method == "tenth" else _title(method),
        **measured.shares("activation memory", "in files", "peak", "step time", "step time, 32 rows"),
        "score, difference to exact": measured.difference(score_text, measured.together, "0"),
        "training loss": measured.difference(loss_text, measured.together, "0"),
        **{f"score, {TITLES[one]}": measured.difference(score_text, [one], "0") for one in measured.apart},
    }
    return columns(measured.of(METHODS if end else _SUMMARY), spec)


def _costs(results: Path) -> str:
    measured = _Measured(results)
    return columns(measured.of(METHODS), {"method": _title, **measured.shares(*_FIELDS)})


def _scores(results: Path) -> str:
    measured = _Measured(results)

    def score(task: str) -> Cell:
        return lambda method: mean_text(measured.score(task, method), 1, factor=100)

    def seeds(method: str) -> str:
        counts = [str(len(measured.score(task, method))) for task in measured.tasks]
        return counts[0] if len({*counts}) == 1 else " / ".join(counts)

    spec: dict[str, Cell] = {"method": _title, **{TITLES[task]: score(task) for task in measured.tasks}}
    for tasks, of in ((measured.together, ""), *(([task], f", {TITLES[task]}") for task in measured.apart)):
        spec[f"score, difference to exact{of}"] = measured.difference(score_text, tasks)
        spec[f"training loss, relative to exact{of}"] = measured.difference(loss_text, tasks)
    trained = [name for name, how in METHODS.items() if name == EXACT or not how.is_exact]
    there = [name for name in trained if any(measured.score(task, name) for task in measured.tasks)]
    return columns(there, {**spec, "seeds": seeds})


def _all_seeds(results: Path) -> str:
    """Lay out methods on tasks for which they have more seeds than all methods have."""
    measured, lines = _Measured(results), list[tuple[str, ...]]()
    for task in measured.tasks:
        for method, how in METHODS.items():
            scores = compared.scores_of(measured.every, task, method)
            if len(scores) == len(compared.scores_of(measured.epochs, task, method)):
                continue
            apart = [100 * each for each in compared.apart_of(measured.every, task, method)]
            others = ["", "", ""]
            if apart and not how.is_exact:
                below = f"{sum(each < 0 for each in apart)} of {len(apart)}"
                others = [mean_text(apart, 1, sign=True), mean_text([statistics.median(apart)], 1, sign=True), below]
            lines.append((TITLES[task], how.title, str(len(scores)), mean_text(scores, 1, factor=100), *others))
    return table(("task", "method", "seeds", "score", "difference to exact", "median", "below exact"), lines)


def _all_rows(rows: Sequence[Epoch]) -> str:
    spec: dict[str, Cell] = {
        "method": lambda row: _title(row.method),
        "seed": lambda row: str(row.seed),
        "accuracy": lambda row: f"{100 * row.score:.1f}",
        "training loss": lambda row: f"{row.train_loss:.4f}",
    }
    return columns((row for row in rows if row.task == _ALL_ROWS and row.epoch == row.epochs), spec)


def _shares(rows: Sequence[Share]) -> str:
    """Lay out a line per operator, after one for all of a case that are not the rest."""
    lines = list[tuple[str, ...]]()
    for case in dict.fromkeys(row.case for row in rows):
        here = [row for row in rows if row.case == case]
        ours = [row for row in here if row.operator != REST]
        share, bare = sum(row.share for row in ours), sum(row.share - row.products for row in ours)
        lines.append((f"**{case}**", "", "together", "", f"{100 * share:.1f} %", f"**{100 * bare:.1f} %**"))
        for row in here:
            without = "" if row.operator == REST else f"{100 * (row.share - row.products):.1f} %"
            what = WORDS.get(row.operator, row.operator)
            lines.append(("", row.phase, what, str(row.calls), f"{100 * row.share:.1f} %", without))
    return table(("case", "phase", "operator", "calls", "share of the step", "without exact's products"), lines)


TABLES: dict[str, Table] = {
    "readme": _readme,
    "frontier-summary": _summary,
    "frontier-bf16": lambda results: _summary(results, compared.BFLOAT16),
    "frontier-cost": _costs,
    "frontier-scores": _scores,
    "frontier-seeds": _all_seeds,
    "frontier-all-rows": from_csv("frontier-accuracy", Epoch, _all_rows),
    "frontier-shares": from_csv("frontier-shares", Share, _shares),
}

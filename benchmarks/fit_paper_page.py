"""The tables of ``docs/planning/paper-sizes.md``, from the csv file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.fit_paper import METHODS, SEQUENCE, Paper
from benchmarks.records import read_rows
from rmm_linear._support.tables import table

Case = Mapping[str, Paper]  # by method
_TITLES = {"chunked": "checkpointed, loss in chunks"}
_TRAINED = {"all": "all weights, AdamW", "LoRA": "LoRA"}


def page(results: Path) -> str:
    """Make the tables.

    Args:
        results: Folder of the csv files.

    Returns:
        A section for each model, and what they show.
    """
    path = results / "fit-paper.csv"
    if not path.is_file():
        return "Nothing is simulated yet: run `python -m benchmarks fit --parts paper`."
    rows = read_rows(path, Paper)
    parts = [section(list(found)) for _, found in groupby(rows, key=lambda row: row.model)]
    about = rows[0]
    commits = ", ".join(f"`{commit[:12]}`" for commit in dict.fromkeys(row.commit for row in rows))
    origin = (
        f"Simulated on {about.machine}, {about.threads} thread{'s' if about.threads != 1 else ''}, PyTorch "
        f"{about.torch}, transformers {about.transformers}, commit {commits}, {max(row.date for row in rows)[:10]}, in "
        f"{sum(row.seconds for row in rows) / 60:.0f} minutes."
    )
    return "\n\n".join((*parts, "### What the tables show", claims(rows), origin))


def section(rows: Sequence[Paper]) -> str:
    """Make the tables of a model.

    Args:
        rows: Of one model.

    Returns:
        What is needed beside activations, the longest sequences, the largest batches, the plans, and the commands.
    """
    cases = _cases(rows)
    model = rows[0].model
    commands = "\n".join(
        f'python -m benchmarks fit --parts paper --models {model} --device "{place}"'
        for place in dict.fromkeys(row.place for row in rows)
    )
    return "\n\n".join(
        (
            f"### {model}",
            "GB on each device beside activations; `fit` takes all of it together to be there at the optimizer's step:",
            _needed(cases),
            "The longest sequence at batch 1, simulated, with the simulated peak in GB:",
            _sizes(cases, lambda row: _cell(row, row.sequence, row.sequence_peak)),
            f"The largest batch per device, sequences of {SEQUENCE} tokens, simulated, with the simulated peak in GB:",
            _sizes(cases, lambda row: _cell(row, row.batch, row.batch_peak)),
            "What the fitted plan does with the blocks:",
            _plans(cases),
            f"Made by:\n\n```sh\n{commands}\n```",
        )
    )


def claims(rows: Sequence[Paper]) -> str:
    """Say what the sequences show.

    Args:
        rows: All of them.

    Returns:
        Counts, and the range of ratios.
    """
    cases = _cases(rows)
    fitting = [case for case in cases if case["exact"].status == "ok"]
    lines = [f"Of {len(cases)} cases, {len(cases) - len(fitting)} do not fit, whatever is done with activations."]
    for ours, theirs, text in (
        ("packed", "checkpointed", "Packing every block, recomputing nothing, reaches"),
        ("packed", "chunked", "Beside recomputation with the loss in chunks, packing reaches"),
        ("fitted", "checkpointed", "The fitted plan reaches"),
        ("fitted", "chunked", "Beside recomputation with the loss in chunks, the fitted plan reaches"),
    ):
        both = [case for case in fitting if case[theirs].sequence]
        ratios = [case[ours].sequence / case[theirs].sequence for case in both]
        if not ratios:
            continue
        named = "recomputing every block" if theirs == "checkpointed" else "that"
        lines.append(
            f"{text} {_range(ratios)} times the sequence of {named}: longer in {sum(one > 1 for one in ratios)} of "
            f"{len(ratios)} cases, shorter in {sum(one < 1 for one in ratios)}."
        )
    return "\n".join(f"- {line}" for line in lines)


def _cases(rows: Sequence[Paper]) -> list[Case]:
    found: dict[tuple[str, str, str], dict[str, Paper]] = {}
    for row in rows:
        found.setdefault((row.model, row.place, row.trained), {})[row.method] = row
    return list(found.values())


def _range(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return least if least == most else f"{least} to {most}"


def _begin(case: Case) -> tuple[str, str]:
    row = case["exact"]
    return row.place, _TRAINED[row.trained]


def _needed(cases: Sequence[Case]) -> str:
    header = (
        "devices", "trained", "parameters", "gradients", "optimizer", "gathered", "together",
        "without `fused=True`, more",
    )  # fmt: skip
    lines = []
    for case in cases:
        row = case["exact"]
        sizes = (row.parameters, row.gradients, row.optimizer, row.gathered, row.needed, row.transient)
        lines.append((*_begin(case), *(f"{size / 1e9:.1f}" if size else "" for size in sizes)))
    return table(header, lines)


def _sizes(cases: Sequence[Case], cell: Callable[[Paper], str]) -> str:
    header = ("devices", "trained", *(_TITLES.get(method, method) for method in METHODS))
    return table(header, [(*_begin(case), *(cell(case[method]) for method in METHODS)) for case in cases])


def _cell(row: Paper, size: int, peak: int | None) -> str:
    if row.status != "ok":
        return row.status
    return f"{size:,} ({peak / 1e9:.1f})" if peak else "none"


def _plans(cases: Sequence[Case]) -> str:
    lines = [(*_begin(case), case["fitted"].plan) for case in cases if case["fitted"].plan]
    return table(("devices", "trained", "blocks"), lines) if lines else "There is none."

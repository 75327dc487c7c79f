"""Run several settings with several seeds, each in a process of its own, and compare them.

A process per run makes peak memory honest. When the comparison is started again, a finished run is reused and an
interrupted one goes on from its checkpoint. The outcome is comparison.csv (a row per run), comparison.md (the table)
and comparison.png.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from glue_finetune.arguments import Arguments, differences, parse, run_settings
from glue_finetune.checkpoints import complete_checkpoints, has_files, make_folder, saving, write_json
from glue_finetune.checks import Setting, parse_setting
from glue_finetune.errors import UserError
from glue_finetune.flags import PROGRAM, flags_parser
from glue_finetune.modeling import check_conversion
from glue_finetune.training import SHORT_REPORTS, check_run, read_results
from rmm_linear._support.files import replacing, write_text
from rmm_linear._support.tables import table as markdown

MARKER = "comparison.json"  # tells a comparison's folder from other files
BASELINE = "exact"
MIB = 2**20
_MARKERS = "os^Dv<>Pp*Xh"
_NOTES = """
- score: {metric}, mean ± standard deviation (number of seeds); best is each run's best epoch, last its last one
- saved: activation memory, the bytes saved for the backward pass of one training step (step {step} of each run) by the
  sketched linear layers and by the whole model, parameters excluded, with the change relative to {baseline}
- time: median seconds per step, relative to {baseline}
- peak: highest memory of the run's own process ({peak_of})
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a comparison: what is compared, its command line, as typed and parsed, and its output_dir."""

    setting: Setting
    seed: int
    argv: tuple[str, ...]
    arguments: Arguments
    folder: Path


def run_comparison(arguments: Arguments, describe: Callable[[pd.DataFrame], str] | None = None) -> int:
    """Do what --compare says; a UserError, before anything is written, if an entry or the folder cannot be used.

    Args:
        arguments: The command line.
        describe: Makes what is printed in the end of the numbers, see :func:`summarize`; None prints all of them.

    Returns:
        The exit status: 0, that of the first run that failed, or 128 plus the number of a signal.
    """
    folder, runs = plan_comparison(arguments)
    _check(runs)
    overwrite = arguments.training.overwrite_output_dir
    pending = [run for run in runs if overwrite or not _is_finished(run)]
    make_folder(folder)
    settings = list(dict.fromkeys(run.setting.label for run in runs))
    with saving(folder / MARKER, f"give {_again(overwrite)}"):
        write_json(folder / MARKER, {"compare": settings, "seeds": list(dict.fromkeys(run.seed for run in runs))})
    status = _execute(runs, pending, overwrite)
    if status:
        return status
    results = {(run.setting.label, run.seed): read_results(run.folder) or {} for run in runs}
    with saving(folder, f"give {_again(overwrite)}; finished runs are kept"):
        text, table = write_summary(folder, results, command=shlex.join(("python", "-m", PROGRAM, *arguments.argv)))
    files = "\n".join(f"  {folder / name}" for name in ("comparison.csv", "comparison.md", "comparison.png"))
    print(f"\n{text if describe is None else describe(table)}\n{files}")
    return 0


def _again(overwrite: bool) -> str:
    return "the same command" if not overwrite else "the same command without --overwrite_output_dir"


def plan_comparison(arguments: Arguments) -> tuple[Path, list[Run]]:
    """Check the flags and the folder, reading only; return the folder and the runs that are asked for."""
    if "kind" in arguments.given:
        raise UserError("--kind and --compare exclude each other. Name the kinds in --compare.")
    settings = [parse_setting(text) for text in arguments.glue.compare or ()]
    seeds = arguments.glue.seeds or [arguments.training.seed]
    for name, values in (("--compare", [setting.label for setting in settings]), ("--seeds", seeds)):
        if len(set(values)) < len(values):
            raise UserError(f"{name} must name everything once, got {' '.join(map(str, values))}.")
    folder = Path(arguments.training.output_dir or "")
    overwrite = arguments.training.overwrite_output_dir
    if has_files(folder) and not overwrite and not (folder / MARKER).is_file():
        raise UserError(
            f"output_dir must be empty or hold an earlier comparison, got {folder} with other files in it. "
            "Choose another one."
        )
    return folder, plan_runs(_own_flags(arguments.argv), settings, seeds, folder)


def plan_runs(argv: Sequence[str], settings: Sequence[Setting], seeds: Sequence[int], folder: Path) -> list[Run]:
    """Make the command line of each run of the flags that all share, and parse it, which checks it."""
    runs = []
    for setting in settings:
        for seed in seeds:
            target = folder / setting.folder / f"seed-{seed}"
            own = ("--save_strategy", "no", *argv, *setting.flags, "--seed", str(seed), "--output_dir", str(target))
            try:
                runs.append(Run(setting, seed, own, parse(list(own)), target))
            except UserError as error:
                raise UserError(f"{setting.label} of --compare: {error}") from error
    return runs


def _own_flags(argv: Sequence[str]) -> list[str]:
    """The user's command line without the flags that each run gets its own of."""
    for parser in (
        flags_parser("compare", "seeds", nargs="+"),
        flags_parser("output_dir", "seed", "resume_from_checkpoint"),
        flags_parser("overwrite_output_dir", "demo", nargs="?"),
    ):
        _, argv = parser.parse_known_args(argv)
    return list(argv)


def _check(runs: Sequence[Run]) -> None:
    _, model_config = check_run(runs[0].arguments)
    for config in {id(run.setting): run.arguments.config for run in runs}.values():
        check_conversion(model_config, config)


def _is_finished(run: Run) -> bool:
    results = read_results(run.folder)
    if results is None:
        return False
    if changes := differences(results.get("settings", {}), run_settings(run.arguments)):
        raise UserError(
            f"{run.folder} holds a run with other settings: {changes}. "
            "Choose another output_dir, or run everything again with --overwrite_output_dir."
        )
    return True


def _execute(runs: Sequence[Run], pending: Sequence[Run], overwrite: bool) -> int:
    for number, run in enumerate(runs, start=1):
        title = f"[{number}/{len(runs)}] {run.setting.label}, seed {run.seed}"
        if run not in pending:
            print(f"{title}: finished before, reused (--overwrite_output_dir runs it again)", flush=True)
            continue
        extra = ["--overwrite_output_dir"] if overwrite else []
        if not overwrite and complete_checkpoints(run.folder):
            extra = ["--resume_from_checkpoint", "last"]
        elif has_files(run.folder):  # killed before its first checkpoint was complete
            extra = ["--overwrite_output_dir"]
        print(f"{title}: {'going on from its checkpoint' if 'last' in extra else 'running'}", flush=True)
        status = run_process([*run.argv, *extra])
        if status:
            ending = "was interrupted" if status in (130, 143) else f"ended with exit status {status}, see above"
            print(f"{PROGRAM}: error: {run.setting.label} with seed {run.seed} {ending}.", file=sys.stderr)
            print(f"Finished runs are kept, {_again(overwrite)} goes on from here.", file=sys.stderr)
            return status
    return 0


def run_process(argv: Sequence[str]) -> int:
    """Run this program in another process, hand it the signals that come meanwhile, and return its exit status."""
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    # Every run of a comparison converts alike: a line about it is enough.
    environment = {**os.environ, SHORT_REPORTS: "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # A group of its own: the terminal sends Ctrl-C to this process alone, and the child gets it once, from here.
    with (
        subprocess.Popen([sys.executable, "-m", PROGRAM, *argv], env=environment, start_new_session=True) as process,
        _passing_on(process) as received,
    ):
        status = process.wait()
    if status < 0:
        status = 128 - status
    return status or (128 + received[0] if received else 0)


@contextmanager
def _passing_on(process: subprocess.Popen) -> Iterator[list[int]]:
    received: list[int] = []

    def handle(signum: int, frame: Any) -> None:
        received.append(signum)
        process.send_signal(signum if signum == signal.SIGINT else signal.SIGTERM)

    # A closed terminal ends this process; the run is in a session of its own and would go on.
    signums = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    # What is ignored stays so: nohup's way of letting a run go on.
    heard = [signum for signum in signums if signal.getsignal(signum) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, handle) for signum in heard}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def write_summary(
    folder: Path, results: dict[tuple[str, int], dict[str, Any]], command: str
) -> tuple[str, pd.DataFrame]:
    """Write comparison.csv, comparison.md and comparison.png.

    Args:
        folder: Where to.
        results: Label and seed of each run to the content of its results.json.
        command: The command line that made them.

    Returns:
        The table and its notes, as text to print, and the numbers in it, see :func:`summarize`.
    """
    runs = collect_runs(results)
    table = summarize(runs)
    first = next(iter(results.values()))
    metric = first["score"]["metric"]
    notes = _NOTES.format(
        metric=metric,
        step=first["memory"]["at_step"],
        peak_of=first["memory"]["peak_of"],
        baseline=BASELINE if BASELINE in table.index else f"{BASELINE}, which was not run",
    )
    text = f"{format_table(table)}\n{notes}"
    write_text(folder / "comparison.csv", runs.to_csv(index=False))
    write_text(folder / "comparison.md", f"# {first['task']}: {metric}\n\n{text}\n```\n{command}\n```\n")
    with replacing(folder / "comparison.png") as temporary:
        plot(table, metric, _title(first)).savefig(temporary, dpi=150)
    return text, table


def collect_runs(results: dict[tuple[str, int], dict[str, Any]]) -> pd.DataFrame:
    """Make the rows of comparison.csv, one per run, of :func:`write_summary`'s results; bytes and seconds."""
    rows = []
    for (label, seed), result in results.items():
        score, memory = result["score"], result["memory"]
        rows.append(
            {
                "setting": label,
                "seed": seed,
                "task": result["task"],
                "metric": score["metric"],
                "best": score["best"],
                "best_epoch": score["best_epoch"],
                "last": score["last"],
                "bytes_kept": memory["bytes_kept_for_backward"],
                "bytes_kept_by_layers": memory.get("bytes_kept_by_layers"),
                "seconds_per_step": result["seconds_per_step"]["median"],
                "peak_bytes": memory["peak_bytes"],
                "peak_of": memory["peak_of"],
                **{f"version_{name}": version for name, version in result["versions"].items()},
                "commit": result["commit"],
            }
        )
    numbers = ("best", "best_epoch", "last", "bytes_kept", "bytes_kept_by_layers", "seconds_per_step", "peak_bytes")
    return pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """Average over the seeds.

    Args:
        runs: See :func:`collect_runs`.

    Returns:
        A row per setting, in the order of the runs: "n", mean and "_std" of "best" and "last", means of the costs, and
        "bytes_ratio", "layers_ratio" and "seconds_ratio" relative to the exact setting (NaN without one).
    """
    groups = runs.groupby("setting", sort=False)
    columns: dict[str, Any] = {"n": groups.size()}
    for name in ("best", "last"):
        columns[name] = groups[name].mean()
        columns[f"{name}_std"] = groups[name].std(ddof=1)
    ratios = {"bytes_kept": "bytes_ratio", "bytes_kept_by_layers": "layers_ratio", "seconds_per_step": "seconds_ratio"}
    for name in (*ratios, "peak_bytes"):
        columns[name] = groups[name].mean()
    table = pd.DataFrame(columns)
    for name, ratio in ratios.items():
        table[ratio] = table[name] / table[name].to_dict().get(BASELINE, math.nan)
    return table


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _score(row: dict[str, float], name: str) -> str:
    deviation = row[f"{name}_std"]
    spread = f" ± {deviation:.4f}" if math.isfinite(deviation) else ""
    return f"{_number(row[name], '.4f')}{spread}" + (f" ({row['n']:.0f})" if row["n"] > 1 else "")


def _saved(row: dict[str, float], name: str, ratio: str) -> str:
    change = f" ({row[ratio] - 1:+.1%})" if math.isfinite(row[ratio]) and row[ratio] != 1 else ""
    return f"{_number(row[name] / MIB, '.1f')} MiB{change.replace('-', '−')}"


COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "best score": lambda row: _score(row, "best"),
    "last score": lambda row: _score(row, "last"),
    "activations, layers": lambda row: _saved(row, "bytes_kept_by_layers", "layers_ratio"),
    "activations, model": lambda row: _saved(row, "bytes_kept", "bytes_ratio"),
    "time": lambda row: _number(row["seconds_ratio"], ".2f"),
    "peak": lambda row: f"{_number(row['peak_bytes'] / MIB, '.0f')} MiB",
}


_WIDTH = 10**6  # a file of Markdown scrolls


def format_table(table: pd.DataFrame, columns: dict[str, Callable[[dict[str, float]], str]] = COLUMNS) -> str:
    """Write a summary in Markdown; `columns` maps the title of each after the first to what makes a cell of a row."""
    rows: dict[Any, Any] = table.to_dict("index")
    cells = [(str(label), *(cell(row) for cell in columns.values())) for label, row in rows.items()]
    return markdown(("setting", *columns), cells, _WIDTH)


def _title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    model = Path(settings["model_name_or_path"]).name
    return f"{model} on {result['task']}, batches of {settings['per_device_train_batch_size']}"


def plot(table: pd.DataFrame, metric: str, title: str) -> Figure:
    """Plot score against memory; markers and labels tell the settings apart, not colours."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    if BASELINE in table.index:
        axes.axhline(table["best"].to_dict()[BASELINE], color="0.6", linestyle="--", linewidth=1, zorder=0)
    for place, (label, row) in enumerate(table.to_dict("index").items()):
        saved = row["bytes_kept"] / MIB
        error = row["best_std"] if math.isfinite(row["best_std"]) else None
        axes.errorbar(
            saved, row["best"], yerr=error, fmt=_MARKERS[place % len(_MARKERS)], markersize=8, capsize=4,
            color="0.15", markerfacecolor="white" if place % 2 else "0.15",
        )  # fmt: skip
        axes.annotate(str(label), (saved, row["best"]), xytext=(9, 6), textcoords="offset points")
    axes.set_xlim(0, 1.25 * table["bytes_kept"].max() / MIB)
    axes.margins(y=0.2)
    seeds = int(table["n"].max())
    axes.set_xlabel("saved for the backward pass of one step (MiB)")
    axes.set_ylabel(f"{metric.replace('_', ' ')}, best epoch (mean{' ± std' if seeds > 1 else ''}, n = {seeds})")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return figure

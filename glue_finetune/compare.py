"""Run several settings with several seeds, each in a process of its own, and compare them.

A process per run makes peak memory honest. When the comparison is started again, a finished run is reused and an
interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import dataclasses
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

from glue_finetune.arguments import PROGRAM, Arguments, flags_parser, parse
from glue_finetune.complete import complete_checkpoints
from glue_finetune.errors import UserError
from glue_finetune.files import has_files, make_folder, saving, write_json
from glue_finetune.modeling import check_conversion
from glue_finetune.results import differences, read_results, run_settings
from glue_finetune.summary import write_summary
from glue_finetune.training import check_run

MARKER = "comparison.json"  # tells a comparison's folder from somebody's files


@dataclasses.dataclass(frozen=True)
class Setting:
    """One entry of --compare: as it was typed, and the flags that it stands for."""

    label: str
    flags: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return self.label.replace(":", "-").replace("@", "-")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a comparison: what is compared, its command line, as typed and parsed, and its output_dir."""

    setting: Setting
    seed: int
    argv: tuple[str, ...]
    arguments: Arguments
    folder: Path


def parse_setting(text: str) -> Setting:
    """Read an entry of --compare; a UserError if it has another form. Values are checked where the flags are."""
    sketch, at, operations = text.partition("@")
    first, *others = sketch.split(":")
    kind, plus, estimator = first.partition("+")
    parts, names = [kind, *others], ("--kind", "--ratio", "--bits")
    if len(parts) > len(names) or not all(parts) or (plus and not estimator) or (at and not operations):
        raise UserError(
            "An entry of --compare must be kind:ratio[:bits], or kind alone, and may end in @ and operations joined by "
            f"+, got {text!r}. Example: rows:0.1@linear"
        )
    words = [word for pair in zip(names, parts, strict=False) for word in pair]
    words += ["--norm_estimator", estimator] if plus else []
    words += ["--operations", *operations.split("+")] if at else []
    return Setting(text, tuple(words))


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
            "Choose another output_dir, or run all anew with --overwrite_output_dir."
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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
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

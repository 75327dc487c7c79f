"""results.json: what a run was, what it reached, and what it cost."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from glue_finetune.arguments import Arguments
from glue_finetune.tasks import Task
from glue_finetune.trainer import BYTES_KEPT, evaluation_scores

RESULTS_FILE, VARIANCE_FILE = "results.json", "variance.csv"
_PACKAGES = ("rmm_linear", "torch", "transformers", "datasets", "evaluate", "accelerate", "numpy")
# Arguments that say where and how loudly a run works, not what comes out of it.
_INCIDENTAL = frozenset(
    {
        *("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "logging_dir", "run_name", "project"),
        *("disable_tqdm", "report_to", "log_level", "log_level_replica", "log_on_each_node", "local_rank", "hub_token"),
        *("save_strategy", "save_steps", "save_total_limit", "save_on_each_node", "dataloader_pin_memory"),
        *("compare", "seeds", "demo"),
    }
)


def run_settings(arguments: Arguments) -> dict[str, Any]:
    """Collect what determines the outcome of a run: equal settings, equal weights.

    Args:
        arguments: The command line.

    Returns:
        JSON types: "sketch" ("exact" or the RMMConfig), the script's flags and transformers' under their own names.
    """
    flags = {**vars(arguments.glue), **arguments.training.to_dict()}
    settings: dict[str, Any] = {name: value for name, value in flags.items() if name not in _INCIDENTAL}
    for name in ("model_name_or_path", "data_dir"):
        path = Path(settings[name] or "").expanduser()
        if settings[name] and path.is_dir():
            settings[name] = str(path.resolve())
    settings["sketch"] = "exact" if arguments.config is None else arguments.config.to_dict()
    # JSON has no infinity; the flags that take one are as well told apart by its name.
    settings = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in settings.items()
    }
    return json.loads(json.dumps(settings, default=str))


def collect_epochs(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gather the Trainer's log into one entry per evaluation.

    Args:
        log_history: ``state.log_history``.

    Returns:
        In order, with "epoch", "step", "train_loss" (since the entry before) and every metric; a number that is not
        finite is None.
    """
    epochs: dict[int, dict[str, Any]] = {}
    train_loss = None
    for entry in log_history:
        train_loss = _finite(entry["loss"]) if "loss" in entry else train_loss
        scores = evaluation_scores(entry)
        if scores:
            row = epochs.setdefault(
                entry["step"], {"epoch": entry["epoch"], "step": entry["step"], "train_loss": train_loss}
            )
            row.update((name, _finite(value)) for name, value in scores.items())
    return list(epochs.values())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def summarize_score(epochs: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Find the best and the last value of the task's main metric.

    Args:
        epochs: See :func:`collect_epochs`.
        metric: Name of the metric.

    Returns:
        "metric", "best", "best_epoch", "last", "last_epoch"; None where there is no finite value.
    """
    scored = [entry for entry in epochs if entry.get(metric) is not None]
    best = max(scored, key=lambda entry: entry[metric], default={})
    last = epochs[-1] if epochs else {}
    return {
        "metric": metric,
        "best": best.get(metric),
        "best_epoch": best.get("epoch"),
        "last": last.get(metric),
        "last_epoch": last.get("epoch"),
    }


def make_results(
    arguments: Arguments, task: Task, log_history: list[dict[str, Any]], seconds: dict[str, Any], extra: dict[str, Any]
) -> dict[str, Any]:
    """Put the content of results.json together.

    Args:
        arguments: The command line.
        task: The task.
        log_history: ``state.log_history`` of the finished run.
        seconds: Seconds per step, see :meth:`StepTimer.summary`.
        extra: More top-level entries.

    Returns:
        JSON types. Memory is in bytes, time in seconds.
    """
    epochs = collect_epochs(log_history)
    settings = run_settings(arguments)
    kept = next((entry for entry in log_history if BYTES_KEPT in entry), {})
    return {
        "task": task.name,
        "sketch": settings["sketch"],
        "seed": arguments.training.seed,
        "score": summarize_score(epochs, task.main_metric),
        "epochs": epochs,
        "memory": {
            "bytes_kept_for_backward": kept.get(BYTES_KEPT),
            "at_step": kept.get("step"),
            "batch_shape": kept.get("batch_shape"),
            **peak_memory(),
        },
        "seconds_per_step": seconds,
        **extra,
        "settings": settings,
        "versions": versions(),
        "commit": commit(),
    }


def peak_memory() -> dict[str, Any]:
    """Measure the peak memory of this process.

    Returns:
        "peak_bytes", and "peak_of": "CUDA" (allocated by torch) where there is a GPU, else "process RSS".
    """
    if torch.cuda.is_available():
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "peak_of": "CUDA"}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "peak_of": "process RSS"}


def versions() -> dict[str, str]:
    """List the versions that a run depends on.

    Returns:
        Name of the package to its version, Python among them.
    """
    import rmm_linear

    found = {"python": platform.python_version(), "rmm_linear": rmm_linear.__version__}
    for name in _PACKAGES[1:]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Find the git commit of this code.

    Returns:
        The commit, with "-dirty" where tracked files differ from it; None outside a git checkout of this code.
    """
    here = Path(__file__)

    program = shutil.which("git")
    if program is None:
        return None

    def git(*command: str) -> str:
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        return subprocess.run((program, *command), cwd=here.parent, **options).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie inside somebody else's checkout
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return None


def read_results(folder: Path) -> dict[str, Any] | None:
    """Read a run's results.

    Args:
        folder: Its output_dir.

    Returns:
        The content of results.json; None if there is none that can be read.
    """
    try:
        return json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return None

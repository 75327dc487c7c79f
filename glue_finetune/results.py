"""results.json: what a run was, what it reached, and what it cost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import rmm_linear
from glue_finetune.arguments import Arguments
from glue_finetune.tasks import Task
from glue_finetune.trainer import BY_OPERATION, BYTES_KEPT, BYTES_OF_LAYERS, evaluation_scores, peak_memory
from rmm_linear._support import provenance

RESULTS_FILE, VARIANCE_FILE = "results.json", "variance.csv"
_PACKAGES = ("torch", "transformers", "datasets", "evaluate", "accelerate", "numpy")
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
    """Return, as JSON types, what determines the outcome of a run: equal settings, equal weights."""
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


def differences(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Name the first settings of two runs that differ, with both values; empty where none does."""
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    return ", ".join(f"{name} was {saved.get(name)!r}, now {wanted.get(name)!r}" for name in names[:3])


def collect_epochs(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gather the Trainer's log into one entry per evaluation; "train_loss" is that since the entry before."""
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


def _summarize_score(epochs: list[dict[str, Any]], metric: str) -> dict[str, Any]:
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
    arguments: Arguments, task: Task, log_history: list[dict[str, Any]], extra: dict[str, Any]
) -> dict[str, Any]:
    """Put results.json together: memory in bytes, time in seconds, a score None where there is no finite one."""
    epochs = collect_epochs(log_history)
    settings = run_settings(arguments)
    kept = next((entry for entry in log_history if BYTES_KEPT in entry), {})
    return {
        "task": task.name,
        "sketch": settings["sketch"],
        "seed": arguments.training.seed,
        "score": _summarize_score(epochs, task.main_metric),
        "epochs": epochs,
        "memory": {
            "bytes_kept_for_backward": kept.get(BYTES_KEPT),
            "bytes_kept_by_layers": kept.get(BYTES_OF_LAYERS),
            "by_operation": kept.get(BY_OPERATION),
            "at_step": kept.get("step"),
            "batch_shape": kept.get("batch_shape"),
            **peak_memory(),
        },
        **extra,
        "settings": settings,
        "versions": {"rmm_linear": rmm_linear.__version__, **provenance.versions(*_PACKAGES)},
        "commit": provenance.commit(__file__),
    }


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return the content of the results.json in a run's output_dir; None if there is none that can be read."""
    try:
        return json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return None

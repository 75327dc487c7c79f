"""One fine-tuning run, from the checked command line to results.json: what it was, what it reached, what it cost."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithPadding, set_seed

import rmm_linear
from glue_finetune.arguments import Arguments, run_settings
from glue_finetune.checkpoints import (
    RESULTS_FILE,
    VARIANCE_FILE,
    check_files,
    choose_checkpoint,
    claimed,
    prepare_folder,
    saving,
    write_json,
)
from glue_finetune.errors import UserError, one_line
from glue_finetune.flags import has_estimators
from glue_finetune.modeling import (
    check_conversion,
    limit_length,
    load_config,
    load_model,
    load_tokenizer,
    sketch,
    take_columns,
    tokenize,
)
from glue_finetune.scoring import make_scorer
from glue_finetune.tasks import GlueData, Task, get_task, load_task
from glue_finetune.trainer import (
    BY_OPERATION,
    BYTES_KEPT,
    BYTES_OF_LAYERS,
    LINEAR_EXACT,
    CheckpointFiles,
    GlueTrainer,
    InterruptCallback,
    StepTimer,
    add_progress,
    evaluation_scores,
    peak_memory,
)
from rmm_linear import ConversionReport, RMMConfig, convert
from rmm_linear._support import provenance
from rmm_linear._support.json_files import read_json
from rmm_linear.estimators import IndexedDataset, with_sample_index
from rmm_linear.integrations.fit_training import ENTRY, FitCallback
from rmm_linear.integrations.pretrained import save_conversion
from rmm_linear.integrations.saved_plans import plan_of
from rmm_linear.integrations.transformers import ProbeCallback
from rmm_linear.planning.budget import BudgetError

SHORT_REPORTS = (
    "RMM_GLUE_SHORT_REPORTS"  # an environment variable: runs of a comparison print a line of their conversion
)
logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "transformers", "datasets", "evaluate", "accelerate", "numpy")


def check_run(arguments: Arguments) -> tuple[GlueData, Any]:
    """Read a run's data and its model's configuration, and check its sketch, without loading or writing anything."""
    glue = arguments.glue
    task = get_task(glue.task_name or "")
    data = load_task(task, glue.data_dir, glue.max_train_samples, glue.max_eval_samples)
    model_config = load_config(task, glue.model_name_or_path)
    check_conversion(model_config, arguments.config)
    if glue.probe_every is not None:
        check_conversion(model_config, arguments.probed)
    return data, model_config


def train(arguments: Arguments) -> int:
    """Fine-tune, evaluate after each epoch, and write results.json into output_dir.

    Everything is read and checked before the first byte is written. The weights of the run follow from its settings
    and seed alone, however often it was interrupted and resumed.

    Args:
        arguments: The command line.

    Returns:
        The exit status: 0, or 128 plus the number of the signal that ended the run early.
    """
    with InterruptCallback().installed() as interrupt, ExitStack() as held:
        return _train(arguments, interrupt, held)


def _train(arguments: Arguments, interrupt: InterruptCallback, held: ExitStack) -> int:
    glue, training = arguments.glue, arguments.training
    task = get_task(glue.task_name or "")
    settings = run_settings(arguments)
    checkpoint = choose_checkpoint(training, settings)
    if checkpoint is not None:
        check_files(checkpoint)

    # Data and model.
    data, model_config = check_run(arguments)
    tokenizer = load_tokenizer(glue.model_name_or_path)
    set_seed(training.seed)  # the classifier starts from random weights
    model = load_model(glue.model_name_or_path, model_config)
    layers = _sketchable(model, arguments.probed)
    report = sketch(model, arguments.config)
    if training.process_index == 0:
        # What the whole model saves is measured in a later step; what fits a budget, in the first one.
        saved = "exact: every layer saves its whole input" if glue.max_memory is None else "exact until the first step"
        is_short = SHORT_REPORTS in os.environ
        print(saved if report is None else report.summary() if is_short else report.modules())
    length = limit_length(tokenizer, glue.max_seq_length)
    dev: dict[str, Any] = {name: tokenize(rows, tokenizer, length) for name, rows in data.dev.items()}
    train_rows: Any = tokenize(data.train, tokenizer, length)
    collator: Any = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training.fp16 else None)
    if arguments.config is not None and has_estimators(arguments.config):
        # The Trainer's own choice of columns would leave out the examples' numbers.
        train_rows = IndexedDataset(take_columns(train_rows, model))
        dev = {name: take_columns(rows, model) for name, rows in dev.items()}
        collator = with_sample_index(collator)

    # The folder, which another run may have written into until now.
    if training.process_index == 0:
        held.enter_context(claimed(Path(training.output_dir or "")))
        if choose_checkpoint(training, settings) != checkpoint:
            raise UserError(
                f"Another run has just written into output_dir {training.output_dir}. Start this one again to go on "
                "from its last checkpoint."
            )
    folder = prepare_folder(training, resuming=checkpoint is not None)

    # Training.
    timer = StepTimer()
    trainer = GlueTrainer(
        model=model,
        args=training,
        train_dataset=train_rows,
        eval_dataset=dev if len(dev) > 1 else next(iter(dev.values())),
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=make_scorer(task, glue.metric_source),
        callbacks=[interrupt, timer, CheckpointFiles(settings, checkpoint)],
    )
    trainer.layers, trainer.report = layers, report
    if glue.max_memory is not None:
        trainer.add_callback(FitCallback(glue.max_memory))
    add_progress(trainer)
    probe = None
    if glue.probe_every is not None:
        probe = ProbeCallback(every=glue.probe_every, config=arguments.probed)
        trainer.add_callback(probe)
    began = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except BudgetError as error:
        raise UserError(one_line(error)) from error
    seconds = time.perf_counter() - began
    state = trainer.state
    if state.global_step < state.max_steps and interrupt.signum is not None:
        logger.warning(
            "Stopped after step %d of %d; %s has the checkpoint. Go on with --resume_from_checkpoint last.",
            state.global_step, state.max_steps, folder,
        )  # fmt: skip
        return 128 + interrupt.signum

    # The model, and results.
    plan = plan_of(model)
    report = report if plan is None else plan.conversion
    if training.save_strategy != "no":
        with saving(folder):
            trainer.save_model()
            if (report is not None or plan is not None) and trainer.is_world_process_zero():
                save_conversion(model, folder)
    if trainer.is_world_process_zero():
        found = (report or ConversionReport(arguments.probed)).in_training(model)
        log = state.log_history
        extra = {
            "seconds_per_step": timer.summary(),
            "seconds_of_training": seconds,
            "steps": state.global_step,
            "resumed": checkpoint is not None,
            "converted": list(found.converted),
            "norm_estimator_bytes": sum(found.estimator_bytes.values()),
            "skipped": dict(found.skipped),
            "packed": dict(Counter(entry.operation for entry in found.packed.values())),
            "recomputed": list(found.checkpointed),
            "linear_exact": next((entry[LINEAR_EXACT] for entry in log if LINEAR_EXACT in entry), {}),
            "attention_exact": _exact_attention(model),
            "fit": next((entry[ENTRY] for entry in reversed(log) if ENTRY in entry), None),
        }
        results = make_results(arguments, task, log, extra)
        if probe is not None:
            with saving(folder / VARIANCE_FILE):
                probe.results.to_csv(folder / VARIANCE_FILE)
            print(
                "variance ratio of the sketches (added variance / variance of the minibatch gradient), from "
                f"{VARIANCE_FILE}:\n{probe.results}"
            )
        with saving(folder / RESULTS_FILE):
            write_json(folder / RESULTS_FILE, results)
        score = results["score"]
        best, last = ("none" if score[name] is None else f"{score[name]:.4f}" for name in ("best", "last"))
        print(f"{task.main_metric}: best {best}, last {last}")
        print(f"results: {folder / RESULTS_FILE}")
    return 0 if interrupt.signum is None else 128 + interrupt.signum


def _exact_attention(model: torch.nn.Module) -> dict[str, str]:
    """Name of every attention that was converted and was exact in its last call, to the reason."""
    reasons = {name: getattr(module, "rmm_exact", None) for name, module in model.named_modules()}
    return {name: reason for name, reason in reasons.items() if isinstance(reason, str)}


def _sketchable(model: torch.nn.Module, config: RMMConfig) -> list[str]:
    """Names of the layers that a configuration selects; none where it does not fit, as an exact run's need not."""
    with suppress(ValueError, TypeError):
        return list(convert(model, config, dry_run=True).converted)
    return []


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
        found = read_json(folder / RESULTS_FILE)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

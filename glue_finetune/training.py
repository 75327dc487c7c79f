"""One fine-tuning run, from the checked command line to results.json."""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithPadding, set_seed

from glue_finetune.arguments import Arguments
from glue_finetune.checkpoints import choose_checkpoint, prepare_folder
from glue_finetune.complete import check_files
from glue_finetune.data import GlueData, load_task
from glue_finetune.errors import UserError, one_line
from glue_finetune.files import claimed, saving, write_json
from glue_finetune.interrupt import InterruptCallback
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
from glue_finetune.results import RESULTS_FILE, VARIANCE_FILE, make_results, run_settings
from glue_finetune.scoring import make_scorer
from glue_finetune.sketch_flags import has_estimators
from glue_finetune.tasks import get_task
from glue_finetune.trainer import LINEAR_EXACT, CheckpointFiles, GlueTrainer, StepTimer, add_progress
from rmm_linear import ConversionReport, RMMConfig, convert
from rmm_linear.estimators import IndexedDataset, with_sample_index
from rmm_linear.integrations.fit_settings import share_or_size
from rmm_linear.integrations.fit_training import ENTRY, FitCallback
from rmm_linear.integrations.pretrained import save_conversion
from rmm_linear.integrations.saved_plans import plan_of
from rmm_linear.integrations.transformers import ProbeCallback

logger = logging.getLogger(__name__)


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


def _train(arguments: Arguments, interrupt: InterruptCallback, held: ExitStack) -> int:
    glue, training = arguments.glue, arguments.training
    task = get_task(glue.task_name or "")
    settings = run_settings(arguments)
    checkpoint = choose_checkpoint(training, settings)
    if checkpoint is not None:
        check_files(checkpoint)
    data, model_config = check_run(arguments)
    tokenizer = load_tokenizer(glue.model_name_or_path)
    set_seed(training.seed)  # the classifier starts from random weights
    model = load_model(glue.model_name_or_path, model_config)
    layers = _sketchable(model, arguments.probed)
    report = sketch(model, arguments.config)
    if training.process_index == 0:
        # What the whole model saves is measured in a later step; what fits a budget, in the first one.
        kept = "exact: every layer keeps its whole input" if glue.max_memory is None else "exact until the first step"
        print(kept if report is None else report.modules())

    length = limit_length(tokenizer, glue.max_seq_length)
    dev: dict[str, Any] = {name: tokenize(rows, tokenizer, length) for name, rows in data.dev.items()}
    train_rows: Any = tokenize(data.train, tokenizer, length)
    collator: Any = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training.fp16 else None)
    if arguments.config is not None and has_estimators(arguments.config):
        # The Trainer's own choice of columns would leave out the examples' numbers.
        train_rows = IndexedDataset(take_columns(train_rows, model))
        dev = {name: take_columns(rows, model) for name, rows in dev.items()}
        collator = with_sample_index(collator)
    if training.process_index == 0:
        held.enter_context(claimed(Path(training.output_dir or "")))
        if choose_checkpoint(training, settings) != checkpoint:  # the folder was another run's until now
            raise UserError(
                f"Another run has just written into output_dir {training.output_dir}. Start this one again to go on "
                "from its last checkpoint."
            )
    folder = prepare_folder(training, resuming=checkpoint is not None)
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
        trainer.add_callback(FitCallback(share_or_size(glue.max_memory)))
    add_progress(trainer)
    probe = None
    if glue.probe_every is not None:
        probe = ProbeCallback(every=glue.probe_every, config=arguments.probed)
        trainer.add_callback(probe)
    began = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except ValueError as error:
        if glue.max_memory is None or "cannot be met" not in str(error):
            raise
        raise UserError(one_line(error)) from error
    seconds = time.perf_counter() - began
    state = trainer.state
    if state.global_step < state.max_steps and interrupt.signum is not None:
        logger.warning(
            "Stopped after step %d of %d; %s has the checkpoint. Go on with --resume_from_checkpoint last.",
            state.global_step, state.max_steps, folder,
        )  # fmt: skip
        return 128 + interrupt.signum
    plan = plan_of(model)
    report = report if plan is None else plan.conversion
    if training.save_strategy != "no":
        with saving(folder):
            trainer.save_model()
            if (report is not None or plan is not None) and trainer.is_world_process_zero():
                save_conversion(model, folder)
    if trainer.is_world_process_zero():
        found = (report or ConversionReport(arguments.probed)).in_training(model)
        extra = {
            "seconds_per_step": timer.summary(),
            "seconds_of_training": seconds,
            "steps": state.global_step,
            "resumed": checkpoint is not None,
            "converted": list(found.converted),
            "bits_chosen": found.bits,
            "norm_estimator_bytes": sum(found.estimator_bytes.values()),
            "skipped": dict(found.skipped),
            "packed": dict(Counter(entry.operation for entry in found.packed.values())),
            "recomputed": list(found.checkpointed),
            "linear_exact": next((entry[LINEAR_EXACT] for entry in state.log_history if LINEAR_EXACT in entry), {}),
            "attention_exact": _exact_attention(model),
            "fit": next((entry[ENTRY] for entry in reversed(state.log_history) if ENTRY in entry), None),
        }
        results = make_results(arguments, task, state.log_history, extra)
        if found.bits:
            chosen = Counter(found.bits.values())
            print("bits=auto chose " + ", ".join(f"{bits} for {chosen[bits]} layers" for bits in sorted(chosen)))
        if probe is not None:
            with saving(folder / VARIANCE_FILE):
                probe.results.to_csv(folder / VARIANCE_FILE)
            print(f"noise of the sketches by that of the minibatch, from {VARIANCE_FILE}:\n{probe.results.summary()}")
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

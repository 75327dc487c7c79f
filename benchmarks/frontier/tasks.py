"""The GLUE tasks that methods are compared on, the model that is fine-tuned, and one run: a method, a task, a seed."""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from transformers import DataCollatorWithPadding, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from benchmarks.frontier.methods import EXACT, METHODS, PARTS, TUNED
from benchmarks.frontier.rows import Epoch
from benchmarks.frontier.runs import Asked, go_on, put_run
from benchmarks.library import mix
from benchmarks.records import known_rows
from glue_finetune.minilm import save_minilm
from glue_finetune.modeling import limit_length, load_config, load_model, load_tokenizer, take_columns, tokenize
from glue_finetune.scoring import make_scorer
from glue_finetune.tasks import PAPER, Task, get_task, load_task
from rmm_linear.estimators import IndexedDataset, with_sample_index

BATCH, _TOKENS, _MAX_LENGTH, _TINY_ROWS = 32, 2048, 128, 96


@dataclass(frozen=True)
class Training:
    task: str  # name of the GLUE task
    epochs: int  # times that the training set is seen
    rows: int | None = None  # only the first rows of the training set
    batch: int = BATCH  # rows per step
    methods: tuple[str, ...] | None = None  # what is trained; None is everything
    seeds: tuple[int, ...] | None = None  # what is trained of those that are asked for; None is all
    slower: float = 1  # by what learning rates are divided
    is_watched: bool = False  # whether the loss on the training set is evaluated, too
    dtype: torch.dtype = torch.float32  # of the model's parameters; the optimizer keeps float32 ones beside bfloat16


_BFLOAT16 = (
    "exact", "checkpoint", "checkpoint-offload", "gaussian-10", "gact", "prac-4", "prac-60", "fp8", "lora",
    "velora", "loract", "lora-tenth", "careful", "tenth", "smallest",
)  # fmt: skip
_QUALITIES = "exact", "tenth", "careful"
TRAININGS: dict[str, Training] = {
    "sst2": Training("sst2", 2, 6000),
    "cola": Training("cola", 2),
    "stsb": Training("stsb", 2),
    "rte": Training("rte", 2),
    "sst2-bf16": Training("sst2", 2, 6000, methods=_BFLOAT16, dtype=torch.bfloat16),
    **{f"{task}-bf16": Training(task, 2, methods=_BFLOAT16, dtype=torch.bfloat16) for task in ("cola", "stsb", "rte")},
    "sst2-full": Training("sst2", 1, methods=("exact", "tenth"), seeds=(0,)),
    "cola-long": Training("cola", 10, batch=16, methods=_QUALITIES, is_watched=True),
    # At the published learning rate, which is meant for a model of five times the parameters.
    "cola-slow": Training("cola", 10, batch=16, methods=(*_QUALITIES, *PARTS), slower=10, is_watched=True),
    # AdamW divides by the size of gradients, noise among it: are steps that are too short what noise costs? Exact
    # training is the control.
    "cola-raised": Training("cola", 10, batch=16, methods=("exact", "tenth"), slower=10 / 1.1, is_watched=True),
}


@dataclass(frozen=True)
class Prepared:
    name: str
    training: Training
    task: Task
    rows: Any  # training set
    dev: Any
    tokenizer: Any
    config: Any
    folder: str  # of the model

    def model(self, seed: int) -> PreTrainedModel:
        set_seed(seed)
        model: Any = load_model(self.folder, self.config)
        return model.to(self.training.dtype).train()

    def collator(self, *, indexed: bool) -> Any:
        collator: Any = DataCollatorWithPadding(self.tokenizer)
        return with_sample_index(collator) if indexed else collator

    def data(self, model: torch.nn.Module, *, indexed: bool) -> tuple[Any, Any]:
        """Return the training set and the dev set, with the columns that a model takes."""
        rows, dev = (take_columns(part, model) for part in (self.rows, self.dev))
        return IndexedDataset(rows) if indexed else rows, dev

    def batch(self, model: torch.nn.Module, *, indexed: bool = False, count: int | None = None) -> dict[str, Any]:
        """Return a batch whose costs are measured, the same for all methods: rows of the median length and no other.

        Some methods keep padding and others do not, and there is none. It is larger than those that are trained on by
        default, so that what is saved outweighs the gradient of the word embeddings, which all methods have.
        """
        rows, _ = self.data(model, indexed=indexed)
        lengths = [len(ids) for ids in self.rows["input_ids"]]
        median = statistics.median_low(lengths)
        alike = [place for place, length in enumerate(lengths) if length == median]
        count = count or max(_TOKENS // median, BATCH)
        return dict(self.collator(indexed=indexed)([rows[place] for place in alike[:count]]))


@functools.lru_cache(maxsize=2)
def prepare(name: str, data_dir: str, folder: str, *, tiny: bool = False) -> Prepared:
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    training = TRAININGS[name]
    task = get_task(training.task)
    if not (Path(folder) / "config.json").is_file():
        save_minilm(Path(folder))
    count = _TINY_ROWS if tiny else training.rows
    data = load_task(task, data_dir, count, _TINY_ROWS if tiny else None)
    tokenizer, config = load_tokenizer(folder), load_config(task, folder)
    length = limit_length(tokenizer, _MAX_LENGTH)
    rows, dev = (tokenize(part, tokenizer, length) for part in (data.train, data.dev[""]))
    return Prepared(name, training, task, rows, dev, tokenizer, config, folder)


class MasterAdamW(torch.optim.AdamW):
    """Steps float32 copies of bfloat16 parameters, whose own spacing would lose most steps, and rounds them back."""

    def __init__(self, params: Any, **fields: Any) -> None:
        self._pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        super().__init__(
            [group | {"params": [self._master(one) for one in group["params"]]} for group in params], **fields
        )

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        master = parameter.detach().float().requires_grad_()
        self._pairs.append((parameter, master))
        return master

    def step(self, closure: Any = None) -> Any:
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
                master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter, _ in self._pairs:
            parameter.grad = None


DROPOUT = "by step"


class SameOrder(Trainer):
    """Takes the order of rows from the seed alone: methods draw from PyTorch's own generator, and not alike."""

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthGroupedSampler:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(rows[place]["input_ids"]) for place in range(len(rows))]
        generator = torch.Generator().manual_seed(self.args.seed)
        return LengthGroupedSampler(self.args.train_batch_size, lengths=lengths, generator=generator)


class SameDropout(TrainerCallback):
    """Begins the random numbers of every step with the seed and the step alone.

    Methods that draw a number per step would shift the masks of dropout of all later steps: differences to the exact
    run of the same seed would be those of other masks.
    """

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        torch.manual_seed(mix(args.seed, state.global_step))


def _optimizer(rate: float) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    betas = PAPER["adam_beta1"], PAPER["adam_beta2"]
    return MasterAdamW, {"lr": rate, "betas": betas, "eps": PAPER["adam_epsilon"], "fused": True}


def train(
    name: str, method: str, seed: int, data_dir: str, model_dir: str, plan: Path | None, tiny: bool
) -> list[Epoch]:
    """Fine-tune the model on a task with one method.

    AdamW, decay and warm-up are those of Bershatsky et al. 2022; batch and learning rate are larger, since the model is
    smaller and sees less. Rows of like length are trained on together: padding would be half of the work.
    """
    how = METHODS[method]
    ready = prepare(name, data_dir, model_dir, tiny=tiny)
    model = ready.model(seed)
    rows, dev = ready.data(model, indexed=how.is_indexed)
    evaluated: dict[str, Any] = {"dev": dev}
    evaluated |= {"train": take_columns(ready.rows, model)} if ready.training.is_watched else {}
    prepared = how.prepare(model, plan)
    rate = how.learning_rate / ready.training.slower
    epochs = ready.training.epochs
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **PAPER, "num_train_epochs": epochs, "learning_rate": rate,
            "per_device_train_batch_size": ready.training.batch, "per_device_eval_batch_size": 64, "seed": seed,
            "eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False, "label_names": ["labels"],
            "dataloader_pin_memory": False, "train_sampling_strategy": "group_by_length",
        }  # fmt: skip
        trainer = SameOrder(
            model=prepared,  # pyright: ignore[reportArgumentType]
            args=TrainingArguments(folder, **settings),
            train_dataset=rows,
            eval_dataset=evaluated,
            data_collator=ready.collator(indexed=how.is_indexed),
            compute_metrics=make_scorer(ready.task),
            callbacks=[SameDropout()],
            optimizer_cls_and_kwargs=_optimizer(rate) if ready.training.dtype != torch.float32 else None,
        )
        trainer.remove_callback(PrinterCallback)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
    logs, metric = trainer.state.log_history, ready.task.main_metric
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    scores = [entry for entry in logs if "eval_dev_loss" in entry]
    fitted = [entry["eval_train_loss"] for entry in logs if "eval_train_loss" in entry] or [None] * epochs
    return [
        Epoch(
            task=name, method=method, seed=seed, epoch=number, epochs=epochs, metric=metric,
            score=score_of(entry[f"eval_dev_{metric}"], entry["eval_dev_loss"]),
            dev_loss=entry["eval_dev_loss"], train_loss=loss,
            steps=int(entry["step"]), seconds=seconds, batch=ready.training.batch, learning_rate=rate,
            rows=len(ready.rows), settings=how.settings(plan), dropout=DROPOUT, fitted_loss=of_rows,
        )
        for number, (loss, entry, of_rows) in enumerate(zip(losses, scores, fitted, strict=True), start=1)
    ]  # fmt: skip


def score_of(score: float, loss: float) -> float:
    """Return 0, as Matthews' correlation is, where all answers are the same and have none; a lost run keeps its NaN."""
    return 0.0 if math.isnan(score) and math.isfinite(loss) else score


def accuracy(asked: Asked, about: dict[str, Any]) -> Iterator[str]:
    """Run what is not there yet, or was run with other settings; the file is whole after every run.

    Seeds are the outer loop, so that all methods are there once before one is there twice.
    """
    path = asked.out / "frontier-accuracy.csv"
    able = {name for name, how in METHODS.items() if name == EXACT or not how.is_exact}
    trained = [name for name in asked.methods if name in able]
    every = [
        (task, method, seed)
        for seed in asked.seeds
        for task in asked.tasks
        for method in trained
        if method in (TRAININGS[task].methods or TUNED) and seed in (TRAININGS[task].seeds or asked.seeds)
    ]

    def plan_of(task: str, method: str) -> Path | None:
        return asked.plan(task, method) if METHODS[method].budget else None

    def is_as_wanted(row: Epoch) -> bool:
        how, training = METHODS[row.method], TRAININGS[row.task]
        settings = how.settings(plan_of(row.task, row.method))
        is_all = asked.tiny or training.rows in (None, row.rows)
        now = (training.epochs, training.batch, how.learning_rate / training.slower, settings, DROPOUT)
        return is_all and now == (row.epochs, row.batch, row.learning_rate, row.settings, row.dropout)

    def arguments(run: tuple[str, str, int]) -> tuple[Any, ...]:
        return train, *run, asked.data_dir, asked.model_dir, plan_of(run[0], run[1]), asked.tiny

    def key(row: Epoch) -> tuple[str, str, int]:
        return row.task, row.method, row.seed

    def keep(run: tuple[str, str, int], found: list[Epoch]) -> str:
        put_run(path, found, about, asked.jobs, key)
        return f"{found[-1].score:.4f} ({found[-1].seconds:.0f} s)"

    planned = [run for run in every if (plan := plan_of(run[0], run[1])) is None or plan.is_file()]
    there = {key(row): row for row in known_rows(path, Epoch)}
    pending = [run for run in planned if run not in there or not is_as_wanted(there[run])]
    for run in (run for run in every if run not in planned):
        yield f"{', '.join(map(str, run))}: no plan, see part cost"
    yield from go_on(asked, len(every), len(planned) - len(pending), pending, arguments, keep)

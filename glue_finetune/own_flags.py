"""The script's own flags, and its help, which needs no transformers."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from glue_finetune.sketch_flags import add_sketch_flags
from glue_finetune.tasks import MAX_SEQ_LENGTH, TASKS

PROGRAM = "glue_finetune"
DEMO_OUTPUT = "out/demo"
DESCRIPTION = """Fine-tune a pretrained model on a GLUE task with sketched linear layers.

  python -m glue_finetune --demo
  python -m glue_finetune --task_name cola --kind countsketch --ratio 0.1 --output_dir out/cola
  python -m glue_finetune --task_name cola --compare exact gaussian:0.1@linear countsketch --seeds 0 1 --output_dir o

The task sets the paper's batch size, learning rate and schedule; any flag overrides them."""
_MORE = """Flags of transformers.TrainingArguments, such as --learning_rate, --num_train_epochs, --seed,
--per_device_train_batch_size and --gradient_checkpointing, are taken too: --help-all shows them."""


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """Make a field with the help text of its flag; other keywords are argparse's."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


@dataclasses.dataclass
class GlueArguments:
    """The script's own flags."""

    _argument_group_name = "task, model and data"

    task_name: str | None = flag(None, f"The task: {', '.join(TASKS)}.")
    model_name_or_path: str = flag("roberta-base", "A folder written by save_pretrained, or a model of the hub.")
    data_dir: str | None = flag(
        None, "Folder in the official GLUE layout (CoLA/train.tsv, ...). Default: nyu-mll/glue of the hub."
    )
    max_seq_length: int = flag(MAX_SEQ_LENGTH, "Tokens per example; longer ones are cut, shorter ones are not padded.")
    max_train_samples: int | None = flag(None, "Train on the first so many rows. Default: all.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first so many rows of each dev set. Default: all.")
    metric_source: str = flag(
        "shipped", "Where the metric's code comes from; both give the same numbers.", choices=("shipped", "hub")
    )
    probe_every: int | None = flag(
        None,
        "Look at the noise of the sketches on every so many steps, and write variance.csv. "
        "With --kind exact, at the noise that the sketch of the other flags would make. Default: never.",
    )
    max_memory: str | None = flag(
        None,
        "Train within so much memory, such as 8GB or a share of the exact model's peak such as 0.5: rmm_linear.fit "
        "chooses what every block saves, in the first step. In place of the flags of the sketch. Default: no limit.",
    )
    demo: bool = flag(False, f"A comparison that needs no network: a generated task, minutes, into {DEMO_OUTPUT}.")
    compare: list[str] | None = flag(  # noqa: RUF009 it makes a field
        None,
        "Settings, each kind:ratio[:bits] or a kind alone, and @ with operations, as in: exact gaussian:0.1@linear. "
        "A norm estimator follows the kind: wta+token:0.3.",
    )
    seeds: list[int] | None = flag(None, "Seeds of a comparison. Default: the one of --seed.")  # noqa: RUF009


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows every default that is one, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # TrainingArguments' texts contain per cent signs that argparse would take for its own.
        text = (action.help or "").replace("%", "%%").replace("%%(", "%(")
        empty = action.default in (None, "", argparse.SUPPRESS) or action.nargs == 0
        return text if empty or "default" in text.lower() else f"{text} (default: %(default)s)"


def short_help() -> str:
    """Return the help of all flags but those of transformers' TrainingArguments."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        usage=f"python -m {PROGRAM} --task_name TASK --output_dir DIR [flags]",
        description=DESCRIPTION,
        epilog=_MORE,
        formatter_class=HelpFormatter,
        add_help=False,
    )
    group = parser.add_argument_group(GlueArguments._argument_group_name)
    group.add_argument("--output_dir", metavar="DIR", help="Folder for results and checkpoints.")
    for field in dataclasses.fields(GlueArguments):
        form: dict[str, Any] = {"action": "store_true"} if field.default is False else {"metavar": field.name.upper()}
        group.add_argument(f"--{field.name}", default=field.default, help=field.metadata["help"], **form)
    add_sketch_flags(parser)
    return parser.format_help()

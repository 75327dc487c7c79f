"""Parse and check the command line: the flags of this script, of RMMConfig, and of transformers' TrainingArguments."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments

from glue_finetune import flags
from glue_finetune.checks import check_values
from glue_finetune.errors import UserError, one_line
from glue_finetune.flags import GlueArguments, flag, flags_parser
from glue_finetune.tasks import get_task, training_defaults
from rmm_linear import RMMConfig


@dataclasses.dataclass
class GlueTrainingArguments(TrainingArguments):
    """TrainingArguments with this script's rule for an output_dir that is not empty."""

    _argument_group_name = "training (transformers.TrainingArguments)"

    overwrite_output_dir: bool = flag(
        False, "Allow a non-empty output_dir; checkpoints and results of an earlier run in it are removed."
    )


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Everything the command line says."""

    glue: GlueArguments
    training: GlueTrainingArguments
    config: RMMConfig | None  # how layers are sketched; None is the exact baseline
    probed: RMMConfig  # the same; of the exact baseline, what the other flags describe
    argv: tuple[str, ...]  # the command line itself
    given: frozenset[str]  # names of the flags that the user gave


class _Parser(flags.Parser, HfArgumentParser):
    pass


def make_parser() -> HfArgumentParser:
    """Build the parser with the defaults that hold for every task; :func:`parse` adds the task's own."""
    parser = _Parser(**flags.TEXTS, formatter_class=flags.HelpFormatter, allow_abbrev=False)
    parser.add_argument("--help-all", action="help", help="show this message, which --help is the short form of")
    # HfArgumentParser's own method, so that the short groups stand before transformers' hundred flags.
    add_group: Callable[[type], None] = parser._add_dataclass_arguments  # pyright: ignore[reportAssignmentType]
    add_group(GlueArguments)
    flags.add_sketch_flags(parser)
    add_group(GlueTrainingArguments)
    parser.set_defaults(
        output_dir="",
        per_device_eval_batch_size=64,
        eval_strategy="epoch",
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    return parser


def parse(argv: list[str]) -> Arguments:
    """Parse and check a command line, which a UserError refuses. Reads the file of --rmm_config, writes nothing."""
    check_values(argv)
    parser = make_parser()
    task_name = flags_parser("task_name").parse_known_args(argv)[0].task_name
    if task_name is not None:
        parser.set_defaults(**training_defaults(get_task(task_name)))
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        flags.refuse_flag(unknown[0], (option for action in parser._actions for option in action.option_strings))
    values = vars(namespace)
    given = _given(parser, argv)
    config, is_exact = flags.build_config(values, given)
    if flags.has_estimators(config):
        values["remove_unused_columns"] = False  # the examples' numbers are no argument of a model's forward
    try:
        training = GlueTrainingArguments(**_pick(values, GlueTrainingArguments))
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(one_line(error)) from error
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > training.world_size:
        raise UserError(
            f"The {launched} processes of a launcher must train together, and each would train by itself, as processes "
            "without an accelerator do by default. Add --use_cpu."
        )
    glue = GlueArguments(**_pick(values, GlueArguments))
    is_unconverted = is_exact or glue.max_memory is not None
    return Arguments(glue, training, None if is_unconverted else config, config, tuple(argv), given)


def _pick(values: dict[str, Any], cls: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.init}


def _given(parser: argparse.ArgumentParser, argv: list[str]) -> frozenset[str]:
    """Names of the flags in argv: those that stay when every default is suppressed."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    return frozenset(vars(parser.parse_known_args(argv)[0]))


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
    values = {**vars(arguments.glue), **arguments.training.to_dict()}
    settings: dict[str, Any] = {name: value for name, value in values.items() if name not in _INCIDENTAL}
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

"""The flags of this script and of RMMConfig, and the checks that need no import of transformers."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import importlib.util
import re
import typing
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from glue_finetune.errors import UserError, one_line
from glue_finetune.tasks import MAX_SEQ_LENGTH, TASKS, get_task
from rmm_linear import RMMConfig
from rmm_linear._support.validation import did_you_mean
from rmm_linear.config import QUALITIES
from rmm_linear.norm_estimators.registry import NONE
from rmm_linear.sketches import KINDS

PROGRAM = "glue_finetune"
DEMO_OUTPUT = "out/demo"
TEXTS: dict[str, Any] = {
    "prog": f"python -m {PROGRAM}",
    "usage": f"python -m {PROGRAM} --task_name TASK --output_dir DIR [flags]",
    "description": """Fine-tune a pretrained model on a GLUE task with sketched linear layers.

  python -m glue_finetune --demo
  python -m glue_finetune --task_name cola --kind countsketch --ratio 0.1 --output_dir out/cola
  python -m glue_finetune --task_name cola --compare exact gaussian:0.1@linear countsketch --seeds 0 1 --output_dir o

The task sets the paper's batch size, learning rate and schedule; any flag overrides them.""",
}
_MORE = """Flags of transformers.TrainingArguments, such as --learning_rate, --num_train_epochs, --seed,
--per_device_train_batch_size and --gradient_checkpointing, are taken too: --help-all shows them."""

EXACT = "exact"  # the kind that converts nothing
_NAMES = ("target_modules", "exclude_modules")
_LISTS = ("operations", *_NAMES)
# All but the mapping that only a file can hold.
_FIELDS = {field.name: field for field in dataclasses.fields(RMMConfig) if field.name != "overrides"}
_WORDS = {"none": None, "true": True, "false": False}


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
        "Measure the noise of the sketches every so many steps and write variance.csv. "
        "With --kind exact, measure the noise that the sketch of the other flags would add. Default: never.",
    )
    max_memory: str | None = flag(
        None,
        "Train within so much memory, such as 8GB or a share of the exact model's peak such as 0.5: in the first "
        "step, rmm_linear.fit chooses what every block saves. Replaces the flags of the sketch. Default: no limit.",
    )
    demo: bool = flag(False, f"A comparison that needs no network: a generated task, minutes, into {DEMO_OUTPUT}.")
    compare: list[str] | None = flag(  # noqa: RUF009 it makes a field
        None,
        "Settings, each kind:ratio[:bits] or a kind alone, and @ with operations, as in: exact gaussian:0.1@linear. "
        "A norm estimator follows the kind: wta+token:0.3.",
    )
    seeds: list[int] | None = flag(None, "Seeds of a comparison. Default: the one of --seed.")  # noqa: RUF009


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show every default that is one, and the description as it was written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # TrainingArguments' texts contain per cent signs that argparse would take for its own.
        text = (action.help or "").replace("%", "%%").replace("%%(", "%(")
        empty = action.default in (None, "", argparse.SUPPRESS) or action.nargs == 0
        return text if empty or "default" in text.lower() else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser that raises a UserError."""

    def error(self, message: str) -> NoReturn:
        """Raise the message."""
        raise UserError(message)


def flags_parser(*names: str, **options: Any) -> argparse.ArgumentParser:
    """Make a parser that picks a few flags, given as ``add_argument`` takes them, out of a command line."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(*spellings(name), dest=name, **options)
    return parser


def short_help() -> str:
    """Return the help of all flags but those of transformers' TrainingArguments."""
    parser = argparse.ArgumentParser(**TEXTS, epilog=_MORE, formatter_class=HelpFormatter, add_help=False)
    group = parser.add_argument_group(GlueArguments._argument_group_name)
    group.add_argument("--output_dir", metavar="DIR", help="Folder for results and checkpoints.")
    for field in dataclasses.fields(GlueArguments):
        form: dict[str, Any] = {"action": "store_true"} if field.default is False else {"metavar": field.name.upper()}
        group.add_argument(f"--{field.name}", default=field.default, help=field.metadata["help"], **form)
    add_sketch_flags(parser)
    return parser.format_help()


def check_flags(words: Sequence[str]) -> None:
    """Raise a UserError for a flag or a task that does not exist; transformers' flags are read from its source."""
    task_name = flags_parser("task_name").parse_known_args(words)[0].task_name
    if task_name is not None:
        get_task(task_name)
    if not (training := theirs()):
        return
    own = [field.name for field in dataclasses.fields(GlueArguments)]
    known = {*own, *_FIELDS, *training, "rmm_config", "quality", "overwrite_output_dir", "help", "help_all"}
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_")
        if word.startswith("--") and not {name, name.removeprefix("no_")} & known:
            refuse_flag(word, [f"--{each}" for each in sorted(known)])


def theirs() -> dict[str, str]:
    """Return the fields of transformers' TrainingArguments with their types, of its source; empty without it."""
    spec = importlib.util.find_spec("transformers")
    source = Path(spec.origin if spec and spec.origin else "").with_name("training_args.py")
    if not source.is_file():
        return {}
    return {
        node.target.id: ast.unparse(node.annotation)
        for each in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(each, ast.ClassDef)
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def refuse_flag(word: str, known: Iterable[str]) -> NoReturn:
    """Raise a UserError that names the flag most like a word that is none."""
    near = difflib.get_close_matches(word.split("=")[0], [*known], n=1)
    remedy = f"Did you mean {near[0]}?" if near else "See --help for all flags."
    raise UserError(f"Every argument must be a known flag or its value, got {word!r}. {remedy}")


def add_sketch_flags(parser: argparse.ArgumentParser) -> None:
    """Add --rmm_config and one flag for each field of RMMConfig but `overrides`."""
    group = parser.add_argument_group("sketch (rmm_linear.RMMConfig)")
    group.add_argument(
        *spellings("rmm_config"),
        metavar="FILE",
        help="A configuration saved by RMMConfig.save. Flags of this group override its fields.",
    )
    group.add_argument(
        "--quality",
        metavar="QUALITY",
        help=f"A preset instead of that file: {', '.join(QUALITIES)}, the second by default.",
    )
    defaults, hints = RMMConfig(), typing.get_type_hints(RMMConfig)
    for name, field in _FIELDS.items():
        # What is wrong with a value, RMMConfig says.
        form: Any = (
            {"nargs": "+", "metavar": "NAME"} if name in _LISTS else {"type": str if hints[name] is str else _value}
        )
        baseline = f" Or {EXACT}, the unchanged baseline." if name == "kind" else ""
        group.add_argument(
            *spellings(name), default=getattr(defaults, name), help=field.metadata["help"] + baseline, **form
        )


def build_config(values: dict[str, Any], given: Collection[str]) -> tuple[RMMConfig, bool]:
    """Make the configuration that parsed flags describe: the file of --rmm_config, changed by the other flags.

    Args:
        values: Name of each flag to its value.
        given: Names of the flags that the user gave; the others leave the file's or RMMConfig's own value.

    Returns:
        The configuration, and whether the kind is exact: then nothing is converted, and the kind is that of the file.

    Raises:
        UserError: If the file cannot be read, or a value is outside its range.
    """
    changes = {name: _names(values[name]) if name in _NAMES else values[name] for name in _FIELDS if name in given}
    kind = changes.get("kind")
    if kind is not None and kind not in (EXACT, *KINDS):
        near = did_you_mean(kind, (EXACT, *KINDS))
        raise UserError(f"kind must be one of {EXACT}, {', '.join(KINDS)}, got {kind!r}.{near}")
    if kind == EXACT:
        del changes["kind"]  # the other flags are checked all the same
    quality, file = values["quality"], values["rmm_config"]
    if quality is not None and file is not None:
        raise UserError(f"rmm_config and quality exclude each other, got {file} and {quality!r}. Give one.")
    try:
        base = RMMConfig.preset(quality or "default") if file is None else _load(Path(file).expanduser())
        return base.replace(**changes), kind == EXACT
    except (ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error


def sketch_flags(given: Collection[str]) -> list[str]:
    """Return the flags of the sketch among those that the user gave."""
    return sorted({"rmm_config", "quality", *_FIELDS} & {*given})


def has_estimators(config: RMMConfig) -> bool:
    """Return whether the configuration or one of its overrides names a norm estimator."""
    fields = ({"norm_estimator": config.norm_estimator}, *config.overrides.values())
    return any(changes.get("norm_estimator", NONE) != NONE for changes in fields)


def spellings(name: str) -> list[str]:
    """Return a flag with underscores and, where it differs, with dashes."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def _load(path: Path) -> RMMConfig:
    try:
        return RMMConfig.load(path)
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise UserError(f"rmm_config must be a file written by RMMConfig.save; {path}: {reason}") from error


def _value(text: str) -> Any:
    """Read a flag's value: a number, true, false or none where it is one, else the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _names(value: list[str]) -> str | list[str]:
    """The words after --target_modules as RMMConfig takes them: a list of names, or a string for anything else."""
    is_name = re.fullmatch(r"[\w.]+", value[0]) and value[0] != "all-linear"
    return value if len(value) > 1 or is_name else value[0]

"""Check the values of a command line, before anything large is imported: those that need no transformers."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from glue_finetune import flags
from glue_finetune.errors import UserError, one_line
from glue_finetune.flags import GlueArguments
from glue_finetune.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Setting:
    """One entry of --compare: as it was typed, and the flags that it stands for."""

    label: str
    flags: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return self.label.replace(":", "-").replace("@", "-")


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


def check_values(words: Sequence[str]) -> None:
    """Raise a UserError for what is missing, for a number that is none, and for a value outside its range."""
    if "--help-all" in words:
        return
    values = vars(_parser().parse_known_args(words)[0])
    is_demo = values.get("demo", False)
    if values.get("task_name") is None and not is_demo:
        raise UserError(f"task_name is required, one of {', '.join(TASKS)}. Or start with --demo.")
    if not values.get("output_dir") and not is_demo:
        raise UserError("output_dir is required, the folder for results and checkpoints. Add --output_dir out/run.")
    _check_numbers(values)
    if values.get("max_memory") is not None:
        _check_max_memory(values["max_memory"], values)
    flags.build_config({**dict.fromkeys(("quality", "rmm_config")), **values}, values)
    for setting in map(parse_setting, values.get("compare", ())):
        own = vars(_parser().parse_known_args([*words, *setting.flags])[0])
        try:
            flags.build_config({**dict.fromkeys(("quality", "rmm_config")), **own}, own)
        except UserError as error:
            raise UserError(f"{setting.label} of --compare: {error}") from error


def _parser() -> argparse.ArgumentParser:
    """Make a parser of this script's flags and of transformers' numbers that has no defaults."""
    parser = flags.Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    hints = typing.get_type_hints(GlueArguments)
    for field in dataclasses.fields(GlueArguments):
        kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
        form: dict[str, Any] = {"choices": field.metadata.get("choices")}
        if field.default is False:
            form = {"nargs": "?", "const": True}
        elif list[int] in kinds or list[str] in kinds:
            form = {"nargs": "+", "type": int if list[int] in kinds else str}
        elif int in kinds:
            form = {"type": int}
        parser.add_argument(*flags.spellings(field.name), dest=field.name, **form)
    for name, kind in flags.theirs().items():
        number = _NUMBERS.get(kind.removesuffix(" | None"))
        if number is not None or name == "output_dir":
            parser.add_argument(*flags.spellings(name), dest=name, type=number or str)
    flags.add_sketch_flags(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


_NUMBERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float}


def _check_max_memory(budget: str, given: Collection[str]) -> None:
    """Check the budget, and that no other flag chooses or measures a sketch."""
    from rmm_linear.integrations.fit_settings import read_fit  # with all of the planners

    excluded = [*flags.sketch_flags(given), *(name for name in ("probe_every", "compare", "demo") if name in given)]
    if excluded:
        raise UserError(
            f"--max_memory chooses what is sketched, so other flags must not, got --{excluded[0]} too. Leave out one "
            "of them."
        )
    try:
        read_fit(budget)
    except ValueError as error:
        raise UserError(f"max_memory: {one_line(error)}") from error


def _check_numbers(values: Mapping[str, Any]) -> None:
    for name in ("seed", "data_seed", "seeds"):
        for seed in values[name] if isinstance(values.get(name), list) else [values.get(name)]:
            if seed is not None and not 0 <= seed < 2**32:
                raise UserError(f"{name} must be in [0, 2**32), got {seed}.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= values.get(name, 0) < 1:
            raise UserError(f"{name} must be in [0, 1), got {values[name]:g}.")
    least = {
        **dict.fromkeys(("max_seq_length", "probe_every", "gradient_accumulation_steps"), 1),
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 1),
        "dataloader_num_workers": 0,
    }
    for name, minimum in least.items():
        if values.get(name, minimum) < minimum:
            raise UserError(f"{name} must be at least {minimum}, got {values[name]}.")
    for name in ("learning_rate", "weight_decay", "warmup_steps", "adam_epsilon", "num_train_epochs"):
        if not 0 <= values.get(name, 0) < math.inf:
            raise UserError(f"{name} must be a finite number of at least 0, got {values[name]:g}.")

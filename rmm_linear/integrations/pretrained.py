"""Save the conversion of a model next to its weights, and convert another model from it.

Weights are those of the original model, so ``model.save_pretrained(folder)`` and every other way of saving stays as it
is. The configuration of the conversion and the state of the sketches go into one small JSON file in the same folder,
with norm estimators also into a safetensors file that it names, see :mod:`rmm_linear.conversion.state_files`. The plan
of a model that :func:`rmm_linear.fit` fitted is a second JSON file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rmm_linear._support.files import write_text
from rmm_linear._support.json_files import read_json
from rmm_linear._support.patterns import entries_for, matches
from rmm_linear.config import STATE_KEY, RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.exact import converted_modules, revert
from rmm_linear.conversion.names import own_name, unwrapped
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.conversion.state import load_saved_state, sketch_state, sketch_tensors, sketched_layers
from rmm_linear.conversion.state_files import remove_with_tensors, tensors_beside
from rmm_linear.integrations.saved_plans import PLAN_FILE, plan_of, read_plan, restore_plan
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.layers.linear import SketchedLayer

CONFIG_FILE = "rmm_config.json"
STATE_FILE = "sketch_state.json"  # of SketchStateCallback


def save_conversion(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the configuration of a conversion, the state of its sketches, and a model's plan, into a folder.

    An earlier conversion in the folder stays valid until this one is complete; where a plan is saved or replaced, an
    interruption leaves files that :func:`convert_as_saved` refuses. :meth:`rmm_linear.RMMConfig.load` reads
    the configuration from the same file, :func:`rmm_linear.planning.load_plan` the plan from ``rmm_plan.json``. A plan
    without conversions is all that is written of a model that has one; what an earlier model left is removed.

    Args:
        model: A converted or fitted model; torch.compile, DataParallel or DistributedDataParallel may wrap it.
        folder: A folder, usually that of ``model.save_pretrained``; it is made if it is not there.

    Raises:
        ValueError: If the model is neither converted nor has a plan, or parts of it were converted by themselves.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> report = convert(model, ratio=0.2, exclude_modules=["1"])
        >>> save_conversion(model, folder)
        >>> twin = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        >>> list(convert_as_saved(twin, folder).converted)
        ['0']
    """
    path, plan = Path(folder) / CONFIG_FILE, plan_of(model)
    layers = sketched_layers(model)
    context = next((one.rmm_context for one in converted_modules(model) if one.rmm_context is not None), None)
    if context is None and plan is None:
        raise ValueError(
            "save_conversion takes a converted or fitted model, got one that is neither. Call rmm_linear.convert first."
        )
    if plan is not None:
        plan.save(path.parent / PLAN_FILE)
    if context is not None:
        if plan is None:
            _check_whole(model)
        config = _without_wrappers(context.config, model, layers)
        with tensors_beside(path, sketch_tensors(model)) as named:
            content = config.to_saved() | {STATE_KEY: sketch_state(model) | named}
            write_text(path, json.dumps(content, indent=2) + "\n")
    else:
        remove_with_tensors(path)
        if plan is not None and plan.config is not None:  # of operations that have no state
            plan.config.save(path)
    if plan is None and (path.parent / PLAN_FILE).exists():
        (path.parent / PLAN_FILE).unlink()


def _check_whole(model: nn.Module) -> None:
    """Check that the model was converted as a whole: what is written of parts would convert all of it."""
    for name, one in unwrapped(model).named_modules():
        if isinstance(one, ConvertedModule):
            names = [] if one.rmm_context is None else one.rmm_context.names  # of wrappers too
            if not (names and own_name(names[one.rmm_index]).endswith(own_name(name))):
                raise ValueError(
                    f"save_conversion takes a model that was converted as a whole, got one with {name}, which was "
                    "converted by itself or as a part of something else. Save each part that convert was called on."
                )


def _without_wrappers(config: RMMConfig, model: nn.Module, layers: dict[str, SketchedLayer]) -> RMMConfig:
    """Replace the names that select modules by those of the unwrapped model."""
    own = {module: own_name(name) for name, module in unwrapped(model).named_modules()}
    names = {name: own[module] for name, module in model.named_modules() if module in own}
    if all(name == one for name, one in names.items()):
        return config
    sketched = {name: one for name, one in names.items() if one in layers}

    def translated(entries: Iterable[str], names: Mapping[str, str], is_same: Callable[[str, str], bool]) -> list[str]:
        found = dict[str, None]()
        for entry in entries:
            meant = [one for before, one in names.items() if is_same(entry, before)]
            stays = meant == [one for one in names.values() if is_same(entry, one)]
            found |= dict.fromkeys([entry] if stays else entries_for(meant, own.values()))
        return [*found]

    def is_met(entry: str, name: str) -> bool:
        return matches([entry], name)

    targets, excluded = config.target_modules, config.exclude_modules
    if not isinstance(targets, str):
        config = config.replace(target_modules=translated(targets, sketched, is_met))
    if excluded is not None and not isinstance(excluded, str):
        config = config.replace(exclude_modules=translated(excluded, names, is_met))
    overrides = {
        entry.removeprefix("^"): fields
        for pattern, fields in config.overrides.items()
        for entry in translated([pattern], names, lambda one, name: config.override_pattern(name) == one)
    }
    return config.replace(overrides=overrides)


def convert_as_saved(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    offload_folder: str | os.PathLike[str] | None = None,
) -> ConversionReport:
    """Convert a model as the one saved in a folder, and restore the state of its sketches; apply its plan.

    Args:
        model: A model with the layers of the saved one, as ``from_pretrained(folder)`` returns it, wrapped or not.
        folder: The folder of :func:`save_conversion`.
        offload_folder: Where offloaded blocks of a model on the CPU write files. The one that the saved plan names is
            not used, as it may come from another user.

    Returns:
        The report of the conversion, empty for a plan without conversions. ``model.rmm_plan`` is the plan.

    Raises:
        FileNotFoundError: If the folder contains neither a conversion nor a plan.
        ValueError: If a file is damaged, or of a model with other layers, or the two are not of one model; the message
            names it. Then the model is as it was.
    """
    model, path = unwrapped(model), Path(folder) / CONFIG_FILE
    if (path.parent / PLAN_FILE).is_file():
        return _planned_as_saved(model, path, offload_folder)
    if not path.exists():
        hint = (
            f"It has the state of sketches alone ({STATE_FILE}), as checkpoints of a Trainer do: convert the model as "
            "for that training, and resume it with the same callback, which restores the state."
            if (path.parent / STATE_FILE).is_file()
            else "save_conversion(model, folder) writes it."
        )
        raise FileNotFoundError(f"{path.parent} must have a conversion, {CONFIG_FILE} or {PLAN_FILE}. {hint}")
    config = RMMConfig.load(path)
    state = read_json(path).get(STATE_KEY)
    try:
        report = convert(model, config)
    except ValueError as error:
        raise ValueError(f"The model cannot be converted by {path}: {error}") from error
    _load_state(model, path, state)
    return report


def _planned_as_saved(model: nn.Module, path: Path, offload_folder: str | os.PathLike[str] | None) -> ConversionReport:
    config = RMMConfig.load(path) if path.is_file() else None
    if config != read_plan(path.parent / PLAN_FILE).config:
        raise ValueError(f"{path} and {PLAN_FILE} next to it must be of one model. Save the conversion again.")
    state = None if config is None else read_json(path).get(STATE_KEY)
    plan = restore_plan(model, path.parent / PLAN_FILE, offload_folder)
    _load_state(model, path, state)
    return plan.conversion or ConversionReport(RMMConfig())


def _load_state(model: nn.Module, path: Path, state: Any) -> None:
    if state is None:  # in a file that RMMConfig.save wrote
        return
    try:
        load_saved_state(model, path, state)
    except BaseException:
        revert(model)
        raise

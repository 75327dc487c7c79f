"""The state of a conversion that a checkpoint needs beside the parameters.

Parameters and state_dict are those of the original model, so checkpoints stay interchangeable. What ``bits="auto"`` has
chosen, or seen so far, goes into a small JSON file beside them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import nn

from rmm_linear._version import __version__
from rmm_linear.bits import BitsChoice
from rmm_linear.files import write_text
from rmm_linear.linear import SketchedLayer


def sketch_state(model: nn.Module) -> dict[str, Any]:
    """Return what the sketched layers of a model have chosen.

    Args:
        model: A converted model.

    Returns:
        A dictionary of plain JSON types: the library's version, and the choice of every sketched layer by its name.
    """
    layers = {name: m.rmm_choice.to_dict() for name, m in model.named_modules() if isinstance(m, SketchedLayer)}
    return {"rmm_linear_version": __version__, "layers": layers}


def load_sketch_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Give the sketched layers of a model the choices of another, converted in the same way.

    Args:
        model: A converted model.
        state: The result of :func:`sketch_state`.

    Raises:
        ValueError: If the layers are not the same, or the state is malformed; then nothing changes.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SketchedLayer)}
    try:
        choices = {name: BitsChoice.from_dict(values) for name, values in state["layers"].items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"The sketch state must be the result of sketch_state, got something else ({error!r})."
        ) from None
    different = sorted(set(layers) ^ set(choices))
    if different:
        raise ValueError(
            "The sketch state must be of a model with the same sketched layers, "
            f"got other ones: {', '.join(different[:3])}. "
            "Convert the model with the configuration that the state was saved under."
        )
    for name, layer in layers.items():
        vars(layer.rmm_choice).update(vars(choices[name]))
        layer.rmm_choice.settle()  # the saved step was complete


def save_sketch_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write :func:`sketch_state` as JSON, atomically.

    Args:
        model: A converted model.
        path: File to write.
    """
    write_text(path, json.dumps(sketch_state(model), indent=1) + "\n")


def read_sketch_state(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Read what :func:`save_sketch_state` wrote into a model.

    Args:
        model: A converted model.
        path: File to read.

    Raises:
        ValueError: If the file is malformed or of another model; the message names it.
    """
    try:
        load_sketch_state(model, json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error

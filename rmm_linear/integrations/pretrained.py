"""The conversion of a model, saved beside its weights and found again.

Weights are those of the original model, so ``model.save_pretrained(folder)`` and every other way of saving stays as it
is. What the folder lacks is that the model was converted, and how: that goes into two small JSON files, and with norm
estimators into a safetensors file.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from rmm_linear.config import RMMConfig
from rmm_linear.convert import convert, revert
from rmm_linear.linear import SketchedLayer
from rmm_linear.report import ConversionReport
from rmm_linear.state import read_sketch_state, save_sketch_state

CONFIG_FILE, STATE_FILE = "rmm_config.json", "sketch_state.json"


def save_conversion(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write how a model was converted, and what its sketches have learned, into a folder.

    Args:
        model: A converted model.
        folder: An existing folder, as a rule that of ``model.save_pretrained``.

    Raises:
        ValueError: If the model is not converted.

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
    layers = (module for module in model.modules() if isinstance(module, SketchedLayer))
    scope = next((layer.rmm_scope for layer in layers if layer.rmm_scope is not None), None)
    if scope is None:
        raise ValueError("save_conversion takes a converted model, got one that is not. Call rmm_linear.convert first.")
    scope.config.save(Path(folder) / CONFIG_FILE)
    save_sketch_state(model, Path(folder) / STATE_FILE)


def convert_as_saved(model: nn.Module, folder: str | os.PathLike[str]) -> ConversionReport:
    """Convert a model as the one that was saved in a folder, and give its sketches what they had learned.

    Args:
        model: A model with the layers of the saved one, as ``from_pretrained(folder)`` returns it.
        folder: The folder of :func:`save_conversion`.

    Returns:
        What was converted.

    Raises:
        FileNotFoundError: If the folder holds no conversion.
        ValueError: If a file is damaged, or of a model with other layers; the message names it. Then the model is not
            converted.
    """
    config = RMMConfig.load(Path(folder) / CONFIG_FILE)
    try:
        report = convert(model, config)
    except ValueError as error:
        raise ValueError(f"The model cannot be converted by {Path(folder) / CONFIG_FILE}: {error}") from error
    path = Path(folder) / STATE_FILE
    if path.is_file():
        try:
            read_sketch_state(model, path)
        except BaseException:
            revert(model)
            raise
    return report

"""Checkpoints of all layers that wait outside of the memory that is counted: on a CPU, in files."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from torch import nn

from benchmarks.library import OFFLOAD, RECOMPUTE, BlockPlan, PlannedBlock, find_blocks

_folders = weakref.WeakKeyDictionary[nn.Module, Path]()


def use_offloaded(model: nn.Module) -> None:
    """Recompute every layer, and keep what it is recomputed from in files, which go with the model."""
    folder = tempfile.mkdtemp(prefix="frontier-")
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    layers = [name for name in find_blocks(model) if name.rpartition(".")[2].isdigit()]
    blocks = [PlannedBlock(name, f"{RECOMPUTE} + {OFFLOAD}") for name in layers]
    BlockPlan(blocks, folder=folder).apply(model)
    _folders[model] = Path(folder)


def host_bytes(model: nn.Module) -> int | None:
    """Count the bytes of a model that wait in files; None for methods that write none."""
    folder = _folders.get(model)
    return None if folder is None else sum(one.stat().st_size for one in folder.rglob("offload-*"))

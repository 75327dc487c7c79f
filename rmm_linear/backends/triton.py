"""Import the Triton kernels: from a checkout of the repository, or installed as ``rmm_linear.kernels``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

KINDS = ("countsketch", "rows", "gaussian", "rademacher", "hadamard")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_OLDEST_TRITON = (3, 4)
_NAME = "rmm_linear.kernels"
_CHECKOUT = Path(__file__).resolve().parents[2] / "kernels" / "torch-ext" / "rmm_kernels"


@functools.cache
def is_installed() -> bool:
    """Say whether a Triton is installed that compiles all kernels; 3.2 and 3.3 do not."""
    if importlib.util.find_spec("triton") is None:
        return False
    found = re.match(r"(\d+)\.(\d+)", importlib.import_module("triton").__version__)
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_TRITON


@functools.cache
def kernels() -> ModuleType:
    """Import the module of the kernels: from a checkout, or as installed."""
    if importlib.util.find_spec(_NAME) is not None or not _CHECKOUT.is_dir():
        return importlib.import_module(_NAME)
    spec = importlib.util.spec_from_file_location(
        _NAME, _CHECKOUT / "__init__.py", submodule_search_locations=[str(_CHECKOUT)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"The kernels in {_CHECKOUT} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module

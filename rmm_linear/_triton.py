"""The Triton kernels: installed as ``rmm_linear.kernels``, or lying beside the package in a checkout."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_NAME = "rmm_linear.kernels"
_CHECKOUT = Path(__file__).resolve().parents[1] / "kernels" / "torch-ext" / "rmm_kernels"


@functools.cache
def kernels() -> ModuleType:
    """Import the kernels.

    Returns:
        The module with ``sparse_sketch``, ``dense_sketch``, ``pack``, ``unpack`` and ``row_norms``.

    Raises:
        ImportError: If Triton is not installed, or the kernels are neither installed nor in a checkout.
    """
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

"""The Triton kernels, and the sketches of this library as calls of them.

They are installed as ``rmm_linear.kernels``, or lie beside the package in a checkout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rmm_linear.backends.select import requested_backend
from rmm_linear.sketches import TokenMask
from rmm_linear.sketches.blocks import block_rows
from rmm_linear.sketches.transforms import next_power_of_two

KINDS = ("countsketch", "rows", "gaussian", "rademacher", "hadamard")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ACCELERATORS = ("cuda", "xpu")  # ROCm calls itself cuda
_OLDEST_TRITON = (3, 4)
_NAME = "rmm_linear.kernels"
_CHECKOUT = Path(__file__).resolve().parents[1] / "kernels" / "torch-ext" / "rmm_kernels"


@functools.cache
def _is_installed() -> bool:
    """Whether there is a Triton that compiles all kernels; 3.2 and 3.3 do not."""
    if importlib.util.find_spec("triton") is None:
        return False
    found = re.match(r"(\d+)\.(\d+)", importlib.import_module("triton").__version__)
    return found is not None and (int(found[1]), int(found[2])) >= _OLDEST_TRITON


def applies_to(tensor: Tensor, kind: str | None = None) -> bool:
    """Say whether the kernels do something with a tensor.

    Args:
        tensor: The matrix.
        kind: One of the kinds of sketches, if one is to be made.

    Returns:
        False where plain PyTorch does it.

    Raises:
        RuntimeError: If the kernels are asked for on CPU, and Triton does not interpret them.
    """
    requested = requested_backend()
    if requested == "triton" and tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "RMM_BACKEND=triton runs on CPU in Triton's interpreter only, and TRITON_INTERPRET=1 is not set. "
            "Set it before Python starts, or use RMM_BACKEND=auto."
        )
    if tensor.dtype not in DTYPES or not (kind is None or kind in KINDS):
        return False
    return requested == "triton" or (requested == "auto" and tensor.device.type in _ACCELERATORS and _is_installed())


@functools.cache
def kernels() -> ModuleType:
    """Import the kernels.

    Returns:
        The module with ``sparse_sketch``, ``dense_sketch``, ``pack``, ``unpack``, ``turn_back``, ``random_keys`` and
        ``row_norms``.

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


def sketch(
    matrix: Tensor,
    seed: Tensor,
    kind: str,
    rows: int,
    block: int | None,
    mask: TokenMask | None,
    *,
    bits: int | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return SᵀM, as :func:`rmm_linear.sketches.sketch` does, packed if ``bits`` are given.

    Args:
        matrix: M, shape (N, D), of one of :data:`DTYPES`.
        seed: int64, shape (1,), on the device of ``matrix``.
        kind: One of :data:`KINDS`.
        rows: K, with fewer rows kept than N.
        block: Tokens per block, or None.
        mask: The tokens that count, or None.
        bits: 8, 4, 2, or None.
        dtype: Of the result where it is not packed; None is that of ``matrix``.

    Returns:
        Shape (K, D); or codes and ranges.
    """
    tokens = matrix.shape[0]
    order, count = (None, None) if mask is None else (mask.order, mask.count)
    stored: dict[str, Any] = {"bits": bits, "dtype": dtype}
    if kind == "countsketch":
        return kernels().sparse_sketch(matrix, seed, rows, order=order, count=count, **stored)
    if kind == "rows":
        index, scale = _gathered(seed, tokens, rows, mask)
        return kernels().sparse_sketch(matrix, seed, rows, index=index, scale=scale, **stored)
    size, _, rows_per_block = block_rows(tokens, rows, block)
    index = _sample(seed, next_power_of_two(size), rows_per_block, None) if kind == "hadamard" else None
    return kernels().dense_sketch(
        matrix, seed, kind, size, rows_per_block, index=index, order=order, count=count, **stored
    )


def _sample(seed: Tensor, population: int, size: int, count: Tensor | None) -> Tensor:
    """The rows that :func:`rmm_linear.sketches.rows.sample` draws."""
    keys = kernels().random_keys(seed, population, count)
    return torch.topk(keys, size, largest=False, sorted=False).indices.sort().values


def _gathered(seed: Tensor, tokens: int, rows: int, mask: TokenMask | None) -> tuple[Tensor, Tensor]:
    """Rows of M and their scales; where all n that count fit, these are they, and rows of scale 0."""
    if mask is None:
        return _sample(seed, tokens, rows, None), seed.new_full((rows,), (tokens / rows) ** 0.5, dtype=torch.float32)
    place = torch.arange(rows, device=seed.device)
    direct = mask.count <= rows
    index = mask.order[torch.where(direct, place, _sample(seed, tokens, rows, mask.count))]
    return index, torch.where(direct, (place < mask.count).float(), (mask.count.float() / rows).sqrt())

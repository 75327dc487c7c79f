"""One table: the implementations of every operation. Which of them runs follows from device, dtype and RMM_BACKEND."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear.backends.select import backend_of
from rmm_linear.ops import native, plain, triton


@dataclass(frozen=True)
class Operation:
    """An operation and what carries it out.

    Attributes:
        plain: Plain PyTorch: the mathematics, and what the others are compared with.
        native: With the C library, on CPU; None is the plain one.
        triton: With the Triton kernels; None is the plain one.
    """

    plain: Callable[..., Any]
    native: Callable[..., Any] | None = None
    triton: Callable[..., Any] | None = None

    def choose(self, tensor: Tensor, *others: Tensor) -> Callable[..., Any]:
        """Choose the implementation for some tensors.

        Args:
            tensor: The matrix that is worked on.
            *others: What else is read.

        Returns:
            A function with the signature of ``plain``.
        """
        return getattr(self, backend_of(tensor, *others)) or self.plain


SKETCH = Operation(plain.sketch, native.sketch, triton.sketch)
PACKED_SKETCH = Operation(plain.packed_sketch, native.packed_sketch, triton.packed_sketch)
UNPACKED_PRODUCT = Operation(plain.unpacked_product, native.unpacked_product, triton.unpacked_product)
PACK = Operation(packing.pack, native.pack, triton.pack)
UNPACK = Operation(packing.unpack, native.unpack, triton.unpack)
SAMPLE_ROWS = Operation(plain.sample_rows, native.sample_rows, triton.sample_rows)
GATHER_ROWS = Operation(sketches.gather, None, triton.gather_rows)
PACKED_ROWS = Operation(plain.packed_rows, native.packed_rows, triton.packed_rows)

"""The table of operations and their implementations; device, dtype and RMM_BACKEND decide which one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rmm_linear import packing, sketches
from rmm_linear.backends.select import backend_of
from rmm_linear.ops import native, plain, triton


@dataclass(frozen=True)
class Operation:
    """An operation and its implementations.

    Attributes:
        plain: In plain PyTorch: the definition, with which the tests compare the others.
        native: With the C library, on CPU; None uses ``plain``.
        triton: With the Triton kernels; None uses ``plain``.
    """

    plain: Callable[..., Any]
    native: Callable[..., Any] | None = None
    triton: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the implementation for the device and dtype of the first tensor among the arguments.

        Args:
            *arguments: As ``plain`` takes them.
            **named: As ``plain`` takes them.

        Returns:
            What ``plain`` returns.

        Raises:
            TypeError: If there is no tensor.
        """
        first, are_plain = None, True
        for value in (*arguments, *named.values()):
            if isinstance(value, Tensor):
                first = value if first is None else first
                are_plain = are_plain and _is_plain(value)
        if first is None:
            raise TypeError("An operation takes at least one tensor, got none.")
        implementation = getattr(self, backend_of(first.device.type, first.dtype)) if are_plain else None
        return (implementation or self.plain)(*arguments, **named)


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds the tensor's values: it is no subclass, not lazily negated, not inside of vmap or grad."""
    if type(tensor) is not Tensor or tensor.is_neg():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


SKETCH = Operation(plain.sketch, native.sketch, triton.sketch)
PACKED_SKETCH = Operation(plain.packed_sketch, native.packed_sketch, triton.packed_sketch)
UNPACKED_PRODUCT = Operation(plain.unpacked_product, native.unpacked_product, triton.unpacked_product)
PACK = Operation(packing.pack, native.pack, triton.pack)
UNPACK = Operation(packing.unpack, native.unpack, triton.unpack)
SAMPLE_ROWS = Operation(plain.sample_rows, native.sample_rows, triton.sample_rows)
GATHER_ROWS = Operation(sketches.gather, native.gather_rows, triton.gather_rows)
PACKED_ROWS = Operation(plain.packed_rows, native.packed_rows, triton.packed_rows)

"""Max pooling that saves which element of each window it took, in as few bits as the window needs. Exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rmm_linear._support.autocast import is_autocast
from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.layouts import LAST, is_channels_last, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.layers.function import SavingFunction, as_no_view
from rmm_linear.ops.pooling import pack_positions, unpack_positions
from rmm_linear.packing.pooling import Window

_POOLS = nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d  # in one, two and three dimensions
_backward_2d = torch.ops.aten.max_pool2d_with_indices_backward.default
_backward_3d = torch.ops.aten.max_pool3d_with_indices_backward.default


class PackedPool(PackedModule):
    """Max pooling that saves the position of each maximum in its window. Output and gradient are exact.

    A module that returns indices stays as it is, and so does one whose windows are wider than the input or have more
    than 256 elements.

    Memory: ⌈log₂ k⌉ bits for each element of the output, of k in a window, where PyTorch saves 8 bytes, and the input.
    """

    rmm_operation = "pooling"
    rmm_learns_rows = False
    ceil_mode: bool
    return_indices: bool

    def forward(self, input: Tensor) -> Any:
        """Pool an input of shape (N, C, …) or (C, …)."""
        if not self.training or self.return_indices or not is_dense(input):
            return super().forward(input)
        call = self._packed_call((), input.device, seeded=False)
        is_saving = torch.is_grad_enabled() and not call.is_exact and input.requires_grad and not is_dtensor(input)
        window = window_of(self, tuple(input.shape))
        if not is_saving or _is_other(self, input) or not input.numel() or window is None or not window.is_distinct:
            return super().forward(input)
        return PoolFunction.run(input, window, self.ceil_mode, call)


class PoolFunction(SavingFunction):
    """Max pooling with the gradient from positions in few bits."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, window: Window, ceil_mode: bool, call: SavingCall) -> Tensor:
        """Pool."""
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(window.size) - 1]
        output, indices = pool(input, *window[1:], ceil_mode=ceil_mode, return_indices=True)
        ctx.call, ctx.window, ctx.ceil_mode, ctx.shape = call, window, ceil_mode, input.shape
        ctx.format = LAST[input.dim()] if is_channels_last(input) else torch.contiguous_format
        ctx.save_for_backward(pack_positions(indices, *map(list, window)))
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient."""
        (y,), (stored,), window = grad_outputs, ctx.saved_tensors, ctx.window
        SavingFunction.received(ctx, y[:0], "a packed pool")
        indices = unpack_positions(stored, list(y.shape), *map(list, window))
        like = torch.empty(ctx.shape, dtype=y.dtype, device=y.device, memory_format=ctx.format)  # whose shape is read
        how = [list(one) for one in window[1:]]
        if len(window.size) == 1:
            how = [[first, *one] for first, one in zip((1, 1, 0, 1), how, strict=True)]
            y, like, indices = (one.unsqueeze(-2) for one in (y, like, indices))
        run = _backward_3d if len(window.size) == 3 else _backward_2d
        found = run(y, like, *how, ctx.ceil_mode, indices)
        return found.squeeze(-2) if len(window.size) == 1 else found, None, None, None


def _is_other(module: nn.Module, input: Tensor) -> bool:
    """Say whether indices are not of what a pool computes: on CPU, of some in three dimensions.

    Autocast computes them in float32, but not if they return indices. And those of channels that are side by side in
    memory have indices outside of windows that are -∞ everywhere.
    """
    if not isinstance(module, nn.MaxPool3d):
        return False
    is_cast = input.dtype != torch.float32 and is_autocast(input.device.type)
    return is_cast or (input.device.type == "cpu" and not input.is_contiguous())


def window_of(module: Any, shape: tuple[int, ...]) -> Window | None:
    """Return the window of a pool on an input of a shape; None for inputs that it refuses."""
    count = next(i for i, kind in enumerate(_POOLS, 1) if isinstance(module, kind))
    if len(shape) not in (count + 1, count + 2):
        return None
    how = module.kernel_size, module.stride, module.padding, module.dilation
    sizes = [tuple(map(int, one if isinstance(one, (tuple, list)) else (one,))) for one in how]
    sizes[1] = sizes[1] or sizes[0]  # an empty stride
    sizes = [one * count if len(one) == 1 else one for one in sizes]
    return Window(shape[-count:], *sizes) if all(len(one) == count for one in sizes) else None


def is_max_pool(module: nn.Module) -> bool:
    """Say whether a module is one of PyTorch's max pools, or a subclass that computes the same, and keeps its indices.

    Example:
        >>> is_max_pool(nn.MaxPool2d(2)), is_max_pool(nn.MaxPool2d(2, return_indices=True))
        (True, False)
    """
    is_own = isinstance(module, _POOLS) and type(module).forward in [kind.forward for kind in _POOLS]
    return is_own and not module.return_indices and _window_alone(module) is not None


def bits_of(module: Any) -> int:
    """Return the bits of a position in the window of a pool."""
    window = _window_alone(module)
    return 0 if window is None else window.bits


def _window_alone(module: Any) -> Window | None:
    """Return the window of a pool on any input; None for one that every input is refused by."""
    return window_of(module, (1,) * (2 + next(i for i, kind in enumerate(_POOLS, 1) if isinstance(module, kind))))

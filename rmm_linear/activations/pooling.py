"""Max pooling that saves which element of each window it took, and average pooling that saves sizes alone. Exact."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rmm_linear._support.autocast import is_autocast
from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.layouts import is_channels_last, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.layers.function import SavingFunction, as_no_view
from rmm_linear.ops.pooling import max_pool, max_pool_backward
from rmm_linear.packing.pooling import Window

_POOLS = nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d  # in one, two and three dimensions
_ADAPTIVE = nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d
_AVERAGES = nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, *_ADAPTIVE


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
        ctx.call, ctx.how = call, (*map(list, window), ceil_mode)
        ctx.is_last = is_channels_last(input)
        output, stored = max_pool(input, *ctx.how)
        ctx.save_for_backward(stored)
        return as_no_view(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient."""
        (y,), (stored,) = grad_outputs, ctx.saved_tensors
        SavingFunction.received(ctx, y[:0], "a packed pool")
        return max_pool_backward(y, stored, *ctx.how, ctx.is_last), None, None, None


class PackedAveragePool(PackedModule):
    """Average pooling that saves the sizes of its input, where PyTorch saves all of it. Exact; in compiled code, as is.

    Memory: nothing.
    """

    rmm_operation = "pooling"
    rmm_learns_rows = False

    def forward(self, input: Tensor) -> Any:
        """Pool an input of shape (N, C, …) or (C, …)."""
        if not self.training or not is_dense(input) or torch.compiler.is_compiling():
            return super().forward(input)
        call = self._packed_call((), input.device, seeded=False)
        is_saving = torch.is_grad_enabled() and not call.is_exact and input.requires_grad and not is_dtensor(input)
        return saving_sizes(super().forward, call, input) if is_saving else super().forward(input)


def saving_sizes(exact: Callable[..., Tensor], call: SavingCall, *args: Any, **named: Any) -> Tensor:
    """Call a function whose gradient needs the sizes and the memory format of its input, and none of its elements."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        return exact(*args, **named)
    context = SimpleNamespace(call=call)

    def pack(x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        return x.new_empty(0, 1), tuple(x.shape), torch.empty_like(x, device="meta").stride()

    def unpack(saved: tuple[Tensor, tuple[int, ...], tuple[int, ...]]) -> Tensor:
        like, shape, strides = saved
        SavingFunction.received(context, like, "an average pool")
        made = like.new_empty_strided(shape, strides)
        made.untyped_storage().resize_(0)  # the gradient may take this memory
        return made

    with saved_tensors_hooks(pack, unpack):
        return exact(*args, **named)


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


def is_average_pool(module: Any) -> bool:
    """Say whether a module is one of PyTorch's average pools that save their input: not those of a single output.

    Example:
        >>> is_average_pool(nn.AvgPool2d(2)), is_average_pool(nn.AdaptiveAvgPool2d(1))
        (True, False)
    """
    kind = next((kind for kind in _AVERAGES if isinstance(module, kind)), None)
    if kind is None or type(module).forward is not kind.forward:
        return False
    sizes: Any = module.output_size if kind in _ADAPTIVE else None
    return {*sizes} != {1} if isinstance(sizes, (tuple, list)) else bool(sizes != 1)


def bits_of(module: Any) -> int:
    """Return the bits of a position in the window of a pool."""
    window = _window_alone(module)
    return 0 if window is None else window.bits


def _window_alone(module: Any) -> Window | None:
    """Return the window of a pool on any input; None for one that every input is refused by."""
    return window_of(module, (1,) * (2 + next(i for i, kind in enumerate(_POOLS, 1) if isinstance(module, kind))))

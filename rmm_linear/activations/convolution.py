"""Convolutions that save their input in few bits.

The gradient with respect to the input needs the weight alone, and that of the weight is linear in the input. So the
backward pass is PyTorch's own on the decoded input x^ = x + e: dX and db are exact, and dW is unbiased. Errors of the
elements are uncorrelated, each with the variance v = scale² / 12 of its group, so that, element by element,

    Var(dW) = the gradient that the weight would have from the input v and the output's gradient dY²

Groups are 64 elements side by side in memory, so that encoding is one pass without a copy: pixels of one channel, or
with ``channels_last`` channels of one pixel. The former have the smaller variance, 0.74 to 0.97 of the latter's in six
convolutions on images of digits, before and after training: a channel of small numbers has small errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin

from rmm_linear._support.autocast import autocast_dtype, autocast_off, cast
from rmm_linear._support.distributed import is_dtensor
from rmm_linear._support.layouts import MemoryLayout, as_shape, is_dense
from rmm_linear.activations.base import PackedModule, SavingCall
from rmm_linear.activations.experts import experts_bits
from rmm_linear.context.sketch_cache import CacheEntry
from rmm_linear.layers.function import SavingFunction, refuse_double_backward, square_of
from rmm_linear.ops.convolutions import decode_matrix, encode_matrix, scales_in
from rmm_linear.packing import GROUP, WIDTHS, sum_dtype
from rmm_linear.packing.rounding import scales_of

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORWARD = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_PARTS = 8  # of the groups, one after the other: with a channel per group, their sums are as large as the input
_FUNCTIONS = {function.__name__ for function in (*_FORWARD, *_TRANSPOSED)}


class ConvolutionForm(NamedTuple):
    """What a call of a convolution computes.

    Attributes:
        pads: What the input is padded by before, as F.pad takes it, in the mode ``mode``; None for nothing.
        output_padding: Of a transposed convolution; None for another one.
        dtype: The dtype that autocast runs it in, or None while it is off.
        layout: Of the input, and ``bits`` of its code.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None
    pads: tuple[int, ...] | None
    mode: str
    dtype: torch.dtype | None
    layout: MemoryLayout
    bits: float

    @classmethod
    def of(
        cls,
        module: Any,
        input: Tensor,
        output_padding: tuple[int, ...] | None,
        dtype: torch.dtype | None,
        bits: float,
    ) -> ConvolutionForm:
        """Return what a module computes of an input."""
        pads, padding, mode = None, module.padding, module.padding_mode
        if output_padding is None and (mode != "zeros" or padding == "same"):
            pads, padding = tuple(module._reversed_padding_repeated_twice), "valid"
        if isinstance(padding, str):
            padding = (0,) * len(module.stride)
        if pads is not None and mode == "zeros":  # as PyTorch: before it, what one side has more than the other alone
            both = [min(pads[i : i + 2]) for i in range(0, len(pads), 2)]
            padding = tuple(reversed(both))
            pads = tuple(one - both[i // 2] for i, one in enumerate(pads))
            pads = pads if any(pads) else None
        mode = "constant" if mode == "zeros" else mode
        how = module.stride, padding, module.dilation, module.groups, output_padding, pads, mode
        return cls(*how, dtype, MemoryLayout.of(input), bits)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the output, by the functions that the module itself calls."""
        place = len(self.stride) - 1
        if self.output_padding is not None:
            how = self.stride, self.padding, self.output_padding, self.groups, self.dilation
            return _TRANSPOSED[place](x, weight, bias, *how)
        x = x if self.pads is None else F.pad(x, self.pads, self.mode)
        return _FORWARD[place](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def gradients(
        self, y: Tensor, x: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute the gradients with respect to input, weight and bias that are needed, as autograd would."""
        size = x.shape
        x = x if self.pads is None else F.pad(x, self.pads, self.mode)
        is_batch = len(size) == len(self.stride) + 2
        x, y = (x, y) if is_batch else (x.unsqueeze(0), y.unsqueeze(0))
        is_transposed, more = self.output_padding is not None, self.output_padding or (0,) * len(self.stride)
        grad_input, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            y, x, weight, [y.shape[1]] if needs[2] else None, self.stride, self.padding, self.dilation,
            is_transposed, more, self.groups, list(needs),
        )  # fmt: skip
        if needs[0]:
            grad_input = grad_input if is_batch else grad_input.squeeze(0)
            grad_input = grad_input if self.pads is None else _unpadded(grad_input, size, self.pads, self.mode)
        return grad_input if needs[0] else None, grad_weight if needs[1] else None, grad_bias if needs[2] else None

    def variance(self, y: Tensor, scales: Tensor, room: Tensor, size: Sequence[int]) -> Tensor:
        """Return the variance that codes add to the gradient of the weight, the sum over its elements.

        All elements of the weight add up what they add, so channels can be added up before. Copies of an element by
        which an input is padded have one error, and are taken to be independent.

        y: The output's gradient. scales: Of the codes. room: The input as decoded, which is overwritten. size: Of the
        weight.
        """
        wide, axes = torch.promote_types(y.dtype, torch.float32), len(self.stride)
        squares = scales_of(scales).square()
        most = squares.max()
        squares, whole = squares / most.clamp_min(torch.finfo(torch.float32).tiny), self.layout.columns // GROUP
        parts = room[:, : whole * GROUP].unflatten(1, (whole, GROUP))
        parts.copy_(squares[:, :whole, None].expand_as(parts))
        room[:, whole * GROUP :] = squares[:, whole:]
        x = self.layout.tensor(room)
        x = x if self.pads is None else F.pad(x, self.pads, self.mode)
        x, y = (x, y) if x.dim() == axes + 2 else (x.unsqueeze(0), y.unsqueeze(0))
        x, y = (one.unflatten(1, (self.groups, -1)) for one in (x, y))
        is_transposed, more = self.output_padding is not None, self.output_padding or (0,) * axes
        step, found = max(self.groups // _PARTS, 1), list[Tensor]()
        for begin in range(0, self.groups, step):
            of_x, of_y = (one[:, begin : begin + step] for one in (x, y))
            sums = of_x.sum(2, dtype=sum_dtype(x.dtype)).to(wide)
            squares = torch.linalg.vector_norm(of_y, dim=2, dtype=sum_dtype(y.dtype)).to(wide).square()
            weight = sums.new_empty(sums.shape[1], 1, *size[2:])
            found += torch.ops.aten.convolution_backward(
                squares, sums, weight, None, self.stride, self.padding, self.dilation, is_transposed, more, len(weight),
                [False, True, False],
            )[1:2]  # fmt: skip
        return torch.stack([one.sum(dtype=torch.float64) for one in found]).sum() * most / 12


def _unpadded(y: Tensor, size: Sequence[int], pads: Sequence[int], mode: str) -> Tensor:
    """Return the gradient of what was padded: each element adds to the one that it is a copy of."""
    if mode == "constant":
        return F.pad(y, [-one for one in pads])
    for i in range(len(pads) // 2):
        axis = y.dim() - 1 - i
        places = torch.arange(size[axis], dtype=torch.float64, device=y.device)  # of any length
        sources = F.pad(places.view(1, 1, -1), pads[2 * i : 2 * i + 2], mode).view(-1).long()
        y = torch.zeros_like(y.narrow(axis, 0, size[axis])).index_add_(axis, sources, y)
    return y


class PackedConvolution(PackedModule):
    """A convolution, also a transposed one, that saves its input in few bits: see the module's docstring.

    The output and the gradients with respect to input and bias are exact, that of the weight is unbiased. With a frozen
    weight nothing is saved, where PyTorch saves the input. A weight that weight normalization makes is made again. An
    input of the model that is no result of a parameter, as images are, is in memory anyway: its convolution is exact
    from the second step on.

    Memory: about bits/8 + 1/64 bytes per element.
    """

    rmm_operation = "convolution"
    rmm_learns_rows = False
    transposed: bool
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    kernel_size: tuple[int, ...]
    padding: tuple[int, ...] | str
    padding_mode: str
    groups: int
    _reversed_padding_repeated_twice: list[int]

    def forward(self, input: Tensor, *args: Any, **named: Any) -> Tensor:
        """Convolve an input, shape (N, C, *) or (C, *); a transposed convolution also takes ``output_size``."""
        run = super().forward
        if not self.transposed:
            return run(input, *args, **named)  # which calls _conv_forward

        def exact() -> Tensor:
            return run(input, *args, **named)

        if not is_dense(input) or self.padding_mode != "zeros" or input.dim() < len(self.stride) + 1:
            return exact()
        size = named.get("output_size", *args[:1]) if named or args else None
        how = input, size, self.stride, self.padding, self.kernel_size, len(self.stride), self.dilation
        more = tuple(self._output_padding(*how))  # pyright: ignore[reportCallIssue]
        return self._convolve(input, self.weight, self.bias, exact, more)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        run = super()._conv_forward  # pyright: ignore[reportAttributeAccessIssue]
        return self._convolve(input, weight, bias, lambda: run(input, weight, bias), None)

    def _convolve(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exact: Callable[[], Tensor],
        output_padding: tuple[int, ...] | None,
    ) -> Tensor:
        if not self.training or not is_dense(input) or input.is_complex() or any(map(is_dtensor, (input, weight))):
            return exact()
        call = self._packed_call((), input.device)  # there are no rows that a mask knows
        is_trained = weight.requires_grad
        if call.is_exact or not torch.is_grad_enabled() or not (is_trained or input.requires_grad):
            return exact()
        axes = len(self.stride)
        if input.dim() not in (axes + 1, axes + 2) or (is_trained and self._is_small(input)):
            return exact()
        dtype = autocast_dtype(input.device.type, input.dtype)
        form = ConvolutionForm.of(self, input, output_padding, dtype, self._width(experts_bits(self.rmm_config)))
        stored = self._stored(input, weight, form, call) if is_trained else None
        output = ConvolutionFunction.run(input, weight, bias, stored, form, call)
        return self._survey(input, output) if is_trained and dtype in (None, input.dtype) else output

    def _is_small(self, input: Tensor) -> bool:
        """Say whether an input has few positions, or is in memory anyway: one without gradients, in compiled code."""
        if torch.compiler.is_compiling() and not input.requires_grad:
            return True
        channels = input.shape[-len(self.stride) - 1]
        return input.numel() <= self.rmm_config.min_rows * channels

    def _stored(self, input: Tensor, weight: Tensor, form: ConvolutionForm, call: SavingCall) -> Tensor:
        """Return the code of an input, or that which another convolution has made of it."""
        entry = self._entry(input, weight, form, call)
        if entry is not None and entry.saved is not None:
            return entry.saved[0]
        with torch.no_grad(), autocast_off(input.device.type):
            matrix = form.layout.matrix(cast(input.detach(), form.dtype))
            stored = encode_matrix(matrix, form.bits, call.seed)
        if entry is not None:
            entry.saved = (stored,)
        return stored

    def _entry(self, input: Tensor, weight: Tensor, form: ConvolutionForm, call: SavingCall) -> CacheEntry | None:
        context = self.rmm_context
        if call.seed is None or context is None or not context.is_open():
            return None
        if call.on_backward is None and not context.sketch_cache.is_shared(self.rmm_index):  # on the short way
            return None
        return context.sketch_cache.entry(input, weight, (self.rmm_operation, form.bits, form.dtype), self.rmm_index)


class ConvolutionFunction(SavingFunction):
    """A convolution whose backward pass is PyTorch's own on the decoded input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stored: Tensor | None,
        form: ConvolutionForm,
        call: SavingCall,
    ) -> Tensor:
        """Apply the convolution exactly."""
        ctx.form, ctx.call = form, call
        ctx.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.dim, sources = _sources(weight)
        ctx.save_for_backward(stored, *sources)
        dtype = form.dtype
        with autocast_off(input.device.type):
            output = form.apply(cast(input, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))
        # Without a batch it is a view, into which nothing could be written.
        return output if input.dim() == len(form.stride) + 2 else as_shape(output, output.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients."""
        (y,), (stored, *sources), form = grad_outputs, ctx.saved_tensors, ctx.form
        refuse_double_backward("a packed convolution")
        weight = sources[0] if ctx.dim is None else torch.ops.aten._weight_norm_interface(*sources, ctx.dim)[0]
        if ctx.call.forward_pass is not None:
            ctx.call.forward_pass.note_backward()
        needs, layout = ctx.needs_input_grad[:3], form.layout
        with autocast_off(y.device.type):
            if needs[1] and stored is not None:
                matrix = decode_matrix(stored, layout.rows, layout.columns, form.bits, y.dtype)
            else:  # its shape and strides decide how dX is computed, but not its values
                matrix = y.new_empty(layout.rows, layout.columns)
            found = form.gradients(y, layout.tensor(matrix), cast(weight, form.dtype), needs)
            if ctx.call.noise is not None and not (stored is None or found[1] is None) and form.bits in WIDTHS:
                scales = scales_in(stored, layout.rows, layout.columns, form.bits)
                variance = form.variance(y, scales, matrix, weight.shape)
                ctx.call.noise(variance, square_of(found[1]), form.bits)
        found = [
            one if one is None or one.dtype == dtype else one.to(dtype)
            for one, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return *found, None, None, None


def _sources(weight: Tensor) -> tuple[int | None, list[Any]]:
    """Return v, g and the dimension of a weight that weight normalization makes of these parameters; else itself."""
    node: Any = None if torch.compiler.is_compiling() else weight.grad_fn
    if node is None or node.name() != "WeightNormInterfaceBackward0":
        return None, [weight]
    sources = [getattr(one, "variable", None) for one, _ in node.next_functions]
    # ZeRO-3 puts them together for the backward pass of weight normalization, which is after the convolution's.
    is_whole = all(
        isinstance(one, nn.Parameter) and one.is_contiguous() and not hasattr(one, "ds_id") for one in sources
    )
    return (node._saved_dim, sources) if is_whole else (None, [weight])


def is_convolution(module: nn.Module) -> bool:
    """Say whether a module is a convolution, also a transposed one, whose sizes are known."""
    return isinstance(module, _KINDS) and not isinstance(module, LazyModuleMixin)


def why_own(module: nn.Module) -> str | None:
    """Say why a convolution stays exact: its class does not compute its output by the methods of PyTorch's."""
    kind, base = type(module), next(one for one in _KINDS if isinstance(module, one))
    own = [vars(one)["forward"] for one in kind.__mro__[: kind.__mro__.index(base)] if "forward" in vars(one)]
    if issubclass(base, _ConvTransposeNd):
        is_known = not own
    else:
        is_known = kind._conv_forward is base._conv_forward and all(map(_calls_on, own))  # pyright: ignore
    return None if is_known else f"{kind.__name__} computes its output by code of its own"


def _calls_on(forward: Callable[..., Any]) -> bool:
    """Say whether a forward leaves the convolution to the class that it is derived from."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    names = set[str]() if code is None else {*code.co_names}
    return not names & _FUNCTIONS and bool(names & {"super", "_conv_forward"})

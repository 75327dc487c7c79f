"""What calls of PyTorch's functions in a module's own code save: each function here tries one call.

It returns None where the call is to be exact: in a pass without gradients, of small tensors and of numbers, and where a
code would free nothing. What it decides before it takes a seed is the same in every pass, as checkpoints repeat seeds.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional as F

from rmm_linear._support.autocast import autocast_dtype, autocast_off
from rmm_linear._support.layouts import MemoryLayout, is_dense
from rmm_linear.activations.base import PackedModule
from rmm_linear.activations.channel_norm import normalized_channels
from rmm_linear.activations.convolution import ConvolutionForm, ConvolutionFunction
from rmm_linear.activations.dropout import DropoutFunction
from rmm_linear.activations.experts import experts_bits
from rmm_linear.activations.gated import gated_bits
from rmm_linear.activations.norm import NormFunction, _Norm
from rmm_linear.activations.norm_form import NormForm
from rmm_linear.activations.pointwise import SEQUENCES, PointwiseFunction
from rmm_linear.activations.pooling import PoolFunction, saving_sizes, window_of
from rmm_linear.activations.products import IndexAddFunction, Product, ProductFunction, encoded
from rmm_linear.activations.softmax import SoftmaxFunction, code_of
from rmm_linear.layers.function import LinearCall, SavingCall, saved_linear, spec_for
from rmm_linear.ops.norms import pack_norm
from rmm_linear.packing.norms import few_elements
from rmm_linear.packing.pointwise import Pointwise
from rmm_linear.sketches.seeds import draw_seed, seeds_of

_TENSORS = (Tensor, nn.Parameter, FakeTensor)
# Nodes between a weight and what is made of it without a number of its own.
_SAME = ("View", "Unsafe", "Reshape", "T", "Permute", "Select", "Slice", "Squeeze", "Unsqueeze", "Expand", "ToCopy",
         "Alias", "Split", "Unbind", "AsStrided")  # fmt: skip


def _are_known(*given: Any) -> bool:
    """Say whether all are dense tensors of PyTorch's own, or None: neither shards, nor logits that are lazy."""
    return all(one is None or (type(one) in _TENSORS and is_dense(one)) for one in given)


def _is_kept(module: PackedModule, site: int) -> bool:
    """Say whether what a call would keep is in memory anyway."""
    context = module.rmm_context
    return context is not None and (module.rmm_index, site) in context.kept_sites


def _is_exact(module: PackedModule, operation: str, site: int | None = None) -> bool:
    """Say whether calls are exact: their operation is not selected, or their codes would free nothing."""
    return operation not in module.rmm_config.operations or (site is not None and _is_kept(module, site))


def _call(module: PackedModule, x: Tensor, seeded: bool = True, site: int | None = None) -> SavingCall | None:
    """Return what a call needs, None where it is exact; there are no rows that a mask knows.

    With a site, the call tells the noise of its code in the first steps.
    """
    call = module._packed_call((), x.device, seeded=seeded)
    if call.is_exact or not torch.is_grad_enabled():
        return None
    seed = call.seed
    if seeded and seed is None and not torch.compiler.is_compiling():
        seed = draw_seed()
    noise = None if site is None or call.noise is None else functools.partial(call.noise, site=site)
    return SavingCall(seed, forward_pass=call.forward_pass, noise=noise)


def _is_large(module: PackedModule, x: Tensor) -> bool:
    """Say whether a tensor has more rows than the least that are coded, as can be told in every pass."""
    if not x.is_floating_point() or not x.dim() or x.layout is not torch.strided or x.is_nested:
        return False
    is_large = x.numel() > module.rmm_config.min_rows * x.shape[-1]
    module._note_rows(is_large)
    return is_large


def _is_weight(x: Tensor) -> bool:
    """Say whether a tensor is a parameter, a view of one or a cast of one; in compiled code, a parameter itself."""
    if torch.compiler.is_compiling():
        return isinstance(x, nn.Parameter)
    node = x.grad_fn
    while node is not None and node.name().startswith(_SAME) and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return x.is_leaf if x.grad_fn is None else hasattr(node, "variable")


def _is_result(x: Tensor, is_weighted: bool) -> bool:
    """Say whether a factor is an activation: it depends on parameters, or is no weight itself and multiplies one."""
    if not x.requires_grad:
        return is_weighted
    return not _is_weight(x) and (torch.compiler.is_compiling() or not x.is_leaf)


def _layout(x: Tensor) -> MemoryLayout:
    """Return the rows in which a factor is encoded: tokens, or as memory has them of images and heads."""
    if x.dim() > SEQUENCES:
        return MemoryLayout.of(x)
    return MemoryLayout(tuple(range(x.dim())), tuple(x.shape), x.numel() // x.shape[-1], x.shape[-1])


# Products


def _multiplied(
    module: PackedModule, site: int, operation: str, product: Product, a: Any, b: Any, added: Any = None
) -> Tensor | None:
    """Return a product whose factors are saved in few bits."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and _are_known(a, b, added)):
        return None
    if a.is_complex() or b.is_complex():
        return None
    places = (site, site + 1)
    if operation not in module.rmm_config.operations or all(_is_kept(module, one) for one in places):
        return None
    large = _is_large(module, a), _is_large(module, b)
    if not any(large) or (product.is_matrix and not _are_matrices(a, b, added)):
        return None
    call = _call(module, a, site=site)
    if call is None:
        return None
    is_traced, config = torch.compiler.is_compiling(), module.rmm_config
    dtype = autocast_dtype(a.device.type, a.dtype) if product.is_matrix else None
    seeds = (None, None) if call.seed is None else seeds_of(call.seed, 2)
    codes: list[Tensor | None] = []
    how: list[tuple[MemoryLayout, float, float] | None] = []
    for place, (one, other) in enumerate(((a, b), (b, a))):
        is_weighted = _is_weight(other)
        is_matrix_of_all = product.is_matrix and place == 1 and one.dim() == 2 < a.dim()
        is_coded = large[place] and other.requires_grad and _is_result(one, is_weighted) and not is_matrix_of_all
        # Compiled code does not tell weights from other tensors, but for parameters themselves.
        is_coded = is_coded and not _is_kept(module, places[place]) and (is_weighted or not is_traced)
        shared = code_of(one, seeds[place]) if is_coded else None  # of softmax, which has it for its own gradient
        if shared is not None:
            codes.append(shared[0])
            how.append(shared[1:])
            continue
        if not is_coded:
            codes.append(None)
            how.append(None)
            continue
        layout, bits = _layout(one), module._width(experts_bits(config) if is_weighted else gated_bits(config))
        how.append((layout, bits, 0.0))
        codes.append(encoded(one, layout, bits, dtype, seeds[place]))
    if codes[0] is None and codes[1] is None:
        return None
    if product.is_matrix and (codes[0] is None or not _is_weight(b)):
        call.noise = None  # whose gradient is no sum over the rows of a code
    output = ProductFunction.run(a, b, added, *codes, tuple(how), product, dtype, call)
    for place, one, code in zip(places, (a, b), codes, strict=True):
        if code is not None and dtype in (None, one.dtype):
            module._survey(one, output, site=place)
    return output


def _are_matrices(a: Tensor, b: Tensor, added: Tensor | None) -> bool:
    dtypes = {one.dtype for one in (a, b, added) if one is not None}
    return a.dim() > 1 and b.dim() > 1 and (len(dtypes) == 1 or autocast_dtype(a.device.type, a.dtype) is not None)


_MUL, _MATMUL = Product(operator.mul, False), Product(torch.matmul, True)


def mul(module: PackedModule, site: int, input: Any, other: Any = None, **others: Any) -> Tensor | None:
    return None if others else _multiplied(module, site, "activation", _MUL, input, other)


def matmul(
    module: PackedModule, site: int, input: Any, other: Any = None, *, mat2: Any = None, **others: Any
) -> Tensor | None:
    other = mat2 if other is None else other
    return None if others else _multiplied(module, site, "linear", _MATMUL, input, other)


def baddbmm(
    module: PackedModule, site: int, input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1,
    **others: Any,
) -> Tensor | None:  # fmt: skip
    """Multiply batches of matrices, and add to them."""
    if others or type(alpha) not in (int, float) or type(beta) not in (int, float):
        return None
    product = Product(functools.partial(torch.baddbmm, beta=beta, alpha=alpha), True, (alpha, beta))
    return _multiplied(module, site, "linear", product, batch1, batch2, input)


def einsum(module: PackedModule, site: int, equation: Any, *operands: Any) -> Tensor | None:
    """Multiply two tensors, and sum over some indices, which each are one of either or of the result."""
    if type(equation) is not str or len(operands) != 2:
        return None
    parts = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation.replace(" ", ""))
    if parts is None:
        return None
    one, other, made = parts.groups()
    is_plain = all(len(set(each)) == len(each) for each in (one, other, made))
    if not is_plain or set(one) - set(other + made) or set(other) - set(one + made):
        return None
    sizes = dict(zip(one, operands[0].shape, strict=False))
    if any(sizes.get(index, size) != size for index, size in zip(other, operands[1].shape, strict=False)):
        return None  # one of size 1, for any
    product = Product(functools.partial(torch.einsum, equation), True, indices=(one, other, made))
    return _multiplied(module, site, "linear", product, *operands)


def linear(module: PackedModule, site: int, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """Apply a linear layer, whose input is saved as that of one."""
    if not _are_known(input, weight, bias) or _is_exact(module, "linear", site):
        return None
    if weight.dim() != 2 or not input.dim() or input.is_complex():
        return None
    dtype = autocast_dtype(input.device.type, input.dtype)
    call = _call(module, input, site=site)
    spec = spec_for(input.shape, (dtype or input.dtype).itemsize, weight, module.rmm_config)
    if spec is None or call is None:
        return None
    held = call.forward_pass
    on_backward = None if held is None else lambda *_: held.note_backward()
    is_whole = spec.rounds_all(input.numel() // input.shape[-1]) and module.rmm_config.memory is None
    noise = call.noise if is_whole else None
    spec = replace(spec, bits=module._width(spec.bits)) if is_whole and spec.bits is not None else spec
    output = saved_linear(input, weight, bias, LinearCall(spec, call.seed, dtype, on_backward=on_backward, noise=noise))
    return module._survey(input, output, site=site) if dtype in (None, input.dtype) else output


def convolution(
    axes: int, module: PackedModule, site: int, input: Any, weight: Any, bias: Any = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: Any = 1,
) -> Tensor | None:  # fmt: skip
    """Convolve an input, which is saved as that of a convolution is."""
    if not _are_known(input, weight, bias) or _is_exact(module, "convolution", site) or isinstance(padding, str):
        return None
    if input.dim() not in (axes + 1, axes + 2) or input.is_complex():
        return None
    if input.numel() <= module.rmm_config.min_rows * input.shape[-axes - 1]:
        return None
    call = _call(module, input, site=site)
    is_given = torch.compiler.is_compiling() and not input.requires_grad
    if call is None or is_given or not (weight.requires_grad or input.requires_grad):
        return None
    dtype = autocast_dtype(input.device.type, input.dtype)
    layout, bits = MemoryLayout.of(input), module._width(experts_bits(module.rmm_config))
    stride, padding, dilation = (_of_axes(one, axes) for one in (stride, padding, dilation))
    form = ConvolutionForm(stride, padding, dilation, groups, None, None, "constant", dtype, layout, bits)
    stored = encoded(input, layout, bits, dtype, call.seed) if weight.requires_grad else None
    output = ConvolutionFunction.run(input, weight, bias, stored, form, call)
    return output if stored is None or dtype not in (None, input.dtype) else module._survey(input, output, site=site)


def _of_axes(size: Any, axes: int) -> tuple[int, ...]:
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    return sizes * (axes // len(sizes))


# Activations, norms and others


def activation(
    kind: Callable[..., Pointwise | None], run: Callable[..., Tensor], module: PackedModule, site: int, input: Any,
    *args: Any, **named: Any,
) -> Tensor | None:  # fmt: skip
    """Apply an activation; ``kind`` says which one it is, None where it is not known or works in place."""
    if "out" in named or input is None or not _are_known(input) or _is_exact(module, "activation", site):
        return None
    if not _is_large(module, input):
        return None
    function = kind(*args, **named)
    call = None if function is None else _call(module, input, not function.is_exact, site)
    if function is None or call is None or not input.requires_grad:
        return None

    def exact(x: Tensor) -> Tensor:
        return run(x, *args, **named)

    bits = int(module._width(function.bits(module.rmm_config.activation_bits)))
    output = PointwiseFunction.run(input, exact, False, function, bits, call)
    return module._survey(input, output, exact, site=site)


def _plain(name: str, inplace: bool = False) -> Pointwise | None:
    return None if inplace else Pointwise(name)


def _gelu(approximate: str = "none") -> Pointwise | None:
    return {"none": Pointwise("gelu"), "tanh": Pointwise("gelu_tanh")}.get(approximate)


def _elu(alpha: float = 1.0, inplace: bool = False) -> Pointwise | None:
    return None if inplace else Pointwise("elu", (float(alpha),))


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Pointwise | None:
    return None if inplace else Pointwise("leaky_relu", (float(negative_slope),))


ACTIVATIONS: dict[str, Callable[..., Pointwise | None]] = {
    **{name: functools.partial(_plain, name) for name in ("silu", "relu", "mish", "hardswish", "sigmoid", "tanh")},
    "gelu": _gelu, "elu": _elu, "leaky_relu": _leaky_relu,
}  # fmt: skip


def clamp(
    module: PackedModule, site: int, input: Any, min: Any = None, max: Any = None, **others: Any
) -> Tensor | None:  # fmt: skip
    """Clamp to numbers, of which a bit per element is saved; the gradient of ±∞ is 0."""
    if others or not isinstance(input, Tensor) or not input.is_floating_point() or torch.compiler.is_compiling():
        return None
    are_numbers = all(one is None or (type(one) in (int, float) and one == one) for one in (min, max))
    if not are_numbers or (input.requires_grad and _is_weight(input)):
        return None
    limits = _beyond(min, -math.inf, input.dtype), _beyond(max, math.inf, input.dtype)
    kind = functools.partial(Pointwise, "hardtanh", limits)
    exact = functools.partial(torch.clamp, min=min, max=max)
    return activation(kind, exact, module, site, input)


@functools.lru_cache(maxsize=256)
def _beyond(limit: float | None, side: float, dtype: torch.dtype) -> float:
    """Return the next number beyond a limit as a dtype has it: Hardtanh has no gradient at its limits, clamp has."""
    if limit is None:
        return side
    wide = torch.promote_types(dtype, torch.float32)
    with torch.inference_mode(False), unset_fake_temporarily():
        held = torch.tensor(float(limit), dtype=dtype, device="cpu").to(wide)
        return float(torch.nextafter(held, torch.tensor(side, dtype=wide, device="cpu")))


def softmax(
    module: PackedModule, site: int, input: Any, dim: Any = None, *others: Any, dtype: torch.dtype | None = None,
    **more: Any,
) -> Tensor | None:  # fmt: skip
    """Apply softmax, of which the probabilities are saved, once for a product of them too."""
    if others or more or input is None or not _are_known(input) or type(dim) is not int:
        return None
    if _is_exact(module, "attention", site):
        return None
    call = _call(module, input) if _is_large(module, input) else None
    if call is None or not input.requires_grad:
        return None
    exact = functools.partial(torch.softmax, dim=dim, dtype=dtype)
    output = SoftmaxFunction.run(input, exact, dim, module.rmm_config.attention_bits, call)
    return module._survey(input, output, functools.partial(torch.softmax, dim=-1, dtype=dtype), site=site)


def dropout(
    module: PackedModule, site: int, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    """Apply dropout, of which a bit per element is saved."""
    is_plain = not isinstance(input, Tensor) or not _are_known(input) or inplace or not training or not 0 < p < 1
    if is_plain or _is_exact(module, "dropout") or not _is_large(module, input):
        return None
    call = _call(module, input, seeded=False)
    return None if call is None or not input.requires_grad else DropoutFunction.run(input, p, False, call)


def layer_norm(
    module: PackedModule, site: int, input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, *_: Any, **__: Any,
) -> Tensor | None:  # fmt: skip
    """Normalize rows, which are saved as those of a norm; whether cuDNN may be used changes nothing."""
    if input is None or not _are_known(input) or not _are_known(weight, bias) or _is_exact(module, "norm", site):
        return None
    dims = len(normalized_shape)
    if not _is_large(module, input) or input.shape[input.dim() - dims :] != tuple(normalized_shape):
        return None
    if few_elements(math.prod(normalized_shape), module.rmm_config.norm_bits) is not None:
        return None
    call = _call(module, input)
    if call is None or not (input.requires_grad or (weight is not None and weight.requires_grad)):
        return None
    norm = _Norm(NormForm(True, eps, 0.0, dims), module.rmm_config.norm_bits, call)

    def exact(x: Tensor) -> Tensor:
        return F.layer_norm(x, normalized_shape, weight, bias, eps)

    with torch.no_grad(), autocast_off(input.device.type):
        stored = pack_norm(input, None, call.seed, norm.bits, eps, True, dims)
    output = NormFunction.run(input, weight, bias, stored, None, exact, norm)
    return module._survey(input, output, exact, dims, site)


def group_norm(
    module: PackedModule,
    site: int,
    input: Any,
    num_groups: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Tensor | None:
    """Normalize groups of channels, which are saved as those of a norm."""
    if input is None or not _are_known(input) or not _are_known(weight, bias) or _is_exact(module, "norm", site):
        return None
    if not _is_large(module, input) or input.dim() < 2 or input.shape[1] % num_groups:
        return None
    if few_elements(input[0].numel() // num_groups, module.rmm_config.norm_bits) is not None:
        return None
    call = _call(module, input)
    if call is None or not (input.requires_grad or (weight is not None and weight.requires_grad)):
        return None

    def exact(x: Tensor) -> Tensor:
        return F.group_norm(x, num_groups, weight, bias, eps)

    coded = normalized_channels(input, weight, bias, exact, num_groups, eps, module.rmm_config.norm_bits, call)
    return module._survey(input, coded, site=site)


def max_pool2d(
    module: PackedModule, site: int, input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor | None:  # fmt: skip
    """Take the largest elements of windows, of which the places are saved."""
    if (
        input is None
        or not _are_known(input)
        or return_indices
        or _is_exact(module, "pooling")
        or not _is_large(module, input)
    ):
        return None
    call = _call(module, input, seeded=False)
    if call is None or not input.requires_grad:
        return None
    window = window_of(nn.MaxPool2d(kernel_size, stride, padding, dilation), tuple(input.shape))
    return None if window is None or not window.is_distinct else PoolFunction.run(input, window, ceil_mode, call)


def average_pool(
    run: Callable[..., Tensor], module: PackedModule, site: int, input: Any, *args: Any, **named: Any
) -> Tensor | None:
    """Average windows, of which the sizes alone are saved; exact."""
    if input is None or not _are_known(input) or _is_exact(module, "pooling") or not _is_large(module, input):
        return None
    call = None if torch.compiler.is_compiling() else _call(module, input, seeded=False)
    return None if call is None or not input.requires_grad else saving_sizes(run, call, input, *args, **named)


def index_add(
    inplace: bool, module: PackedModule, site: int, input: Any, dim: Any, index: Any, source: Any, *, alpha: Any = 1
) -> Tensor | None:
    """Add rows to others, of which the places alone are saved; exact."""
    if type(dim) is not int or not _are_known(input, index, source) or _is_exact(module, "pooling"):
        return None
    if not _is_large(module, source) or (inplace and torch.compiler.is_compiling()) or alpha != 1:
        return None
    call = _call(module, input, seeded=False)
    is_changed = inplace and input.is_leaf and input.requires_grad  # which PyTorch refuses
    if call is None or not source.requires_grad or is_changed:
        return None
    return IndexAddFunction.run(input, dim, index, source, inplace, call)

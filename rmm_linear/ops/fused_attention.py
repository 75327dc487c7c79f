"""The fused kernels of PyTorch for attention: which one runs, its dropout on CUDA, and gradients from unpacked rows.

A backward pass needs the output and the logarithms of the sums of exponentials, which are not saved. One more forward
pass on what was unpacked makes both, so they belong to the same probabilities as the gradients.

Dropout: a kernel draws which scores it drops from the state of the device's generator, by their position, and makes no
tensor of them. So the state at the forward pass and the kernel are all that is saved, 17 bytes. In the backward pass,
the generator goes back to this state for the second forward pass, and then to where it was.

Memory of the backward pass: one call of a kernel has queries, keys, values, output and three gradients, 3 + 4 r times
the bytes of the queries where keys have r of them. Where that is more than five times, large tensors are handled in
parts, a few sequences or heads at a time, and the gradients of a part overwrite the rows that it has read. With
dropout, a part has to begin at its own random numbers. Those of two kernels follow from the number of scores, or heads,
before it:

    FLASH_ATTENTION       32 for each head                          (flash_attn/dropout.h)
    EFFICIENT_ATTENTION   one for each score                        (mem_eff_attention/kernel_forward.h)

Those of cuDNN are not documented, so its backward pass with dropout is one call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from rmm_linear.packing.attention import AttentionSpec

FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
KERNELS = (FLASH, EFFICIENT, CUDNN)
_HALF = (torch.float16, torch.bfloat16)
_MULTIPLE = 8  # of features of a head, which all kernels take without padding
_WIDEST = 256  # features of a head, of the flash kernel
_ALIGNED = 16  # elements: of the rows of a mask, in memory
_WHOLE = 1 << 23  # elements of the queries that are handled at once
_MOST = 5  # times the queries' bytes, that a backward pass may take
_SHARE, _PADDED_SHARE = 0.4, 0.25  # of the heads, handled at once; with padding, keys and masks are repeated as well
_PER_HEAD = 32  # random numbers of the flash kernel
_LONG = 768  # queries from which PyTorch's kernel for CPUs has its largest blocks, and keys
_LOWEST = -65504.0  # what PyTorch gives cuDNN for −∞
Part = tuple[tuple[int, int], tuple[int, int]]  # the first and the count: of sequences, and of heads of keys


def runs_kernels(tensor: Tensor) -> bool:
    """Say whether fused kernels of PyTorch may run: on CUDA."""
    return tensor.device.type == "cuda"


def is_faster_on_cpu(grad_output: Tensor, spec: AttentionSpec) -> bool:
    """Say whether PyTorch's kernel for CPUs is faster than blocks of scores: long sequences, by tiles in bfloat16."""
    is_known = grad_output.device.type == "cpu" and grad_output.dtype == torch.bfloat16
    fits = spec.width == grad_output.shape[3] and min(grad_output.shape[1], spec.keys) >= _LONG
    return is_known and fits and _has_tiles()


@functools.cache
def _has_tiles() -> bool:
    return hasattr(torch.cpu, "_is_amx_tile_supported") and torch.cpu._is_amx_tile_supported()


def why_no_kernel(query: Tensor, value: Tensor, has_bias: bool) -> str | None:
    """Return why no kernel can run with dropout and repeat it, by what is known without asking the device; or None."""
    if has_bias:
        return "a bias is added to the scores"
    if query.dtype not in (*_HALF, torch.float32):
        return f"the dtype is {query.dtype}"
    if query.shape[-1] % _MULTIPLE or value.shape[-1] % _MULTIPLE:
        return f"the features of a head are no multiple of {_MULTIPLE}"
    return None


def chosen_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec, enable_gqa: bool
) -> SDPBackend:
    """Return what ``F.scaled_dot_product_attention`` runs in training; some kernels have no backward pass everywhere.

    Such are those for wide heads on some devices: with tensors that need no gradient they would be chosen too.
    """
    with torch.enable_grad():
        tensors = _in_training(query, key, value)
        choice = torch.ops.aten._fused_sdp_choice(
            *tensors, mask, spec.p, spec.is_causal, scale=spec.scale, enable_gqa=enable_gqa
        )
    return SDPBackend(choice)


def _in_training(*tensors: Tensor) -> Sequence[Tensor]:
    """Return tensors of which one needs a gradient at least: PyTorch takes other kernels where none does."""
    if any([one.requires_grad for one in tensors]):
        return tensors
    return [one.detach().requires_grad_() for one in tensors]


def shares_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Say whether kernels are to find the keys of a head themselves; where not, keys and values are repeated.

    As transformers does: with a mask, or heads that the flash kernel does not take, they would make all scores.
    """
    return query.shape[1] != key.shape[1] and mask is None and key.shape[-1] == value.shape[-1] <= _WIDEST


def repeated(tensor: Tensor, heads: int) -> Tensor:
    """Repeat keys or values, (B, hk, T, d), for each of ``heads`` heads of queries."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def dropped_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spec: AttentionSpec,
    kernel: SDPBackend | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output of PyTorch's attention with dropout, (B, Tq, h, dv), and the state from which it was drawn.

    kernel: Of :func:`chosen_kernel`; None asks it. The state is that of the generator, uint8, and one byte for the
    kernel, on the CPU.
    """
    kernel = chosen_kernel(query, key, value, mask, spec, enable_gqa) if kernel is None else kernel
    is_replaced = query.is_cuda and kernel not in KERNELS  # in compiled code, which cannot ask before
    kernel = EFFICIENT if is_replaced else kernel
    state = generator_of(query.device).get_state()
    state = torch.cat((state, state.new_full((1,), kernel.value)))
    # As in training, so that PyTorch takes the kernel of training; below autograd, so that nothing is saved.
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        if is_replaced:
            key, value = (repeated(tensor, query.shape[1]) for tensor in (key, value))
            bias = _bias(mask, query, key.shape[2], kernel)
            output = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, False, spec.p, spec.is_causal, scale=spec.scale
            )[0]
        else:
            query, key, value = _in_training(query, key, value)
            output = F.scaled_dot_product_attention(
                query, key, value, mask, spec.p, spec.is_causal, scale=spec.scale, enable_gqa=enable_gqa
            )
    return output.detach().transpose(1, 2).contiguous(), state


def state_bytes(device: torch.device) -> int:
    """Return the bytes of the state of :func:`dropped_output`, by the device of its tensors."""
    return 1 + (16 if device.type == "cuda" else len(torch.get_rng_state()))


def kernel_in(state: Tensor) -> SDPBackend:
    return SDPBackend(int(state[-1]))


def generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@contextmanager
def _drawn_again(device: torch.device, state: Tensor | None, skipped: int) -> Iterator[None]:
    """Put the generator to a state, less ``skipped`` numbers, and then to where it was."""
    if state is None:
        yield
        return
    generator = generator_of(device)
    before = generator.get_state()
    generator.set_state(state[:-1])
    if skipped:
        generator.set_offset(generator.get_offset() + skipped)
    try:
        yield
    finally:
        generator.set_state(before)


def fused_gradients(
    grad_output: Tensor,
    rows: list[Tensor],
    spec: AttentionSpec,
    mask: Tensor | None = None,
    state: Tensor | None = None,
    index: Tensor | None = None,
    kv_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients with respect to queries, keys and values; None where no fused kernel fits.

    grad_output: dO, (B, Tq, h, dv). rows: Queries (n, h · d), keys (nk, hk · d) and values (nk, hk · dv), of its dtype,
    in memory that is overwritten; the list is emptied. state: Of :func:`dropped_output`; None without
    dropout. index, kv_index: Tokens of the rows; None for all. Returns shapes as
    :func:`rmm_linear.ops.attention.attention_backward`.
    """
    batch, queries, heads, _ = grad_output.shape
    places = (queries, heads, index), *((spec.keys, spec.kv_heads, kv_index),) * 2
    found = [_placed(rows.pop(0), batch, *place) for place in places]
    valid = None
    if index is not None:
        valid = (
            index.new_zeros(batch * queries, dtype=torch.bool).index_fill_(0, index, True).view(batch, queries, 1, 1)
        )
    kernel = None if state is None else kernel_in(state)
    group, skips = heads // spec.kv_heads, {FLASH: _PER_HEAD, EFFICIENT: queries * spec.keys}
    # With dropout, of a kernel whose random numbers are known, at a place where a generator can begin.
    is_split = kernel is None or (skips.get(kernel, 1) % 4 == 0 and torch.version.hip is None)
    share = _SHARE if mask is None and index is None else _PADDED_SHARE
    # Heads of keys are not repeated.
    shares = share == _SHARE and kernel != EFFICIENT and grad_output.is_cuda and grad_output.dtype in _HALF
    if not is_split or found[0].numel() <= _WHOLE or (shares and 3 + 4 / group <= _MOST):
        share = 1.0
    parts = list(_parts(batch, spec.kv_heads, share))
    for sequences, own in parts:
        head = own[0] * group, own[1] * group
        q, k, v = (_part(one, sequences, at).transpose(1, 2) for one, at in zip(found, (head, own, own), strict=True))
        y = _part(grad_output, sequences, head)
        y = y.contiguous() if valid is None else y.where(valid.narrow(0, *sequences), 0)
        seen = None if mask is None else _part(mask.transpose(1, 2), sequences, head).transpose(1, 2)
        kernel = kernel or _kernel_for_gradients(q, k, v, seen, spec)
        if kernel is None:
            return None
        skipped = 0 if state is None else (sequences[0] * heads + head[0]) * skips.get(kernel, 0)
        with _drawn_again(y.device, state, skipped):
            made = kernel_gradients(kernel, y.transpose(1, 2), q, k, v, seen, spec)
        if len(parts) == 1:
            dq, dk, dv = (one.transpose(1, 2) for one in made)
            return dq, dk, dv
        for place, one in zip((q, k, v), made, strict=True):
            place.copy_(one)  # no other part reads these rows
        del made
    dq, dk, dv = found
    return dq, dk, dv


def _placed(rows: Tensor, batch: int, tokens: int, heads: int, index: Tensor | None) -> Tensor:
    """(n, h · d) to (B, T, h, d), 0 for tokens that have no row."""
    if index is not None:
        rows = rows.new_zeros(batch * tokens, rows.shape[1]).index_copy_(0, index, rows)
    return rows.view(batch, tokens, heads, -1)


def _parts(batch: int, heads: int, share: float) -> Iterator[Part]:
    """Yield what is handled at once, at most a share: some sequences, or some heads of one."""
    if share * batch >= 1 or not batch:
        step = max(1, int(share * batch))
        yield from (((first, min(step, batch - first)), (0, heads)) for first in range(0, batch, step))
        return
    step = max(1, int(share * heads * batch))
    for sequence in range(batch):
        yield from (((sequence, 1), (first, min(step, heads - first))) for first in range(0, heads, step))


def _part(tensor: Tensor, sequences: tuple[int, int], heads: tuple[int, int]) -> Tensor:
    """Return some sequences and heads of (B or 1, T, h or 1, …)."""
    tensor = tensor if tensor.shape[0] in (1, sequences[1]) else tensor.narrow(0, *sequences)
    return tensor if tensor.shape[2] in (1, heads[1]) else tensor.narrow(2, *heads)


def _kernel_for_gradients(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> SDPBackend | None:
    """Return the kernel for gradients without dropout; None where none fits."""
    if not query.is_cuda:
        return FLASH  # see is_faster_on_cpu
    width, is_half = query.shape[-1], query.dtype in _HALF
    if width % _MULTIPLE or value.shape[-1] % _MULTIPLE:
        return None
    is_aligned = not (spec.is_causal and query.shape[2] != key.shape[2])  # the flash kernel aligns the last tokens
    shares = query.shape[1] != key.shape[1]
    if is_half and is_aligned and width == value.shape[-1] <= _WIDEST and not (shares and mask is not None):
        choice = chosen_kernel(query, key, value, mask, spec, shares)
        if choice == CUDNN or (choice == FLASH and mask is None):
            return choice
    if shares:  # as they are when repeated, for which the values do not matter
        key, value = (one.new_empty(one.shape[0], query.shape[1], *one.shape[2:]) for one in (key, value))
    return EFFICIENT if chosen_kernel(query, key, value, mask, spec, False) in KERNELS else None


def kernel_gradients(
    kernel: SDPBackend, y: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel forward and backward; all shapes (B, heads, T, features), those of the gradients too."""
    heads, p, how = query.shape[1], spec.p, {"scale": spec.scale}
    kv_heads, causal, aten = key.shape[1], spec.is_causal, torch.ops.aten
    if not query.is_cuda or kernel == EFFICIENT or (kernel == CUDNN and not shares_heads(query, key, value, mask)):
        key, value = repeated(key, heads), repeated(value, heads)
    tensors, bias = (query, key, value), _bias(mask, query, key.shape[2], kernel)
    if not query.is_cuda:
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, p, causal, **how)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            y, *tensors, output, sums, p, causal, **how
        )
    elif kernel == FLASH:
        output, sums, *lengths, state, unused, _ = aten._scaled_dot_product_flash_attention(
            *tensors, p, causal, False, **how
        )
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            y, *tensors, output, sums, *lengths, p, causal, state, unused, **how
        )
    elif kernel == CUDNN:
        output, sums, *lengths, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            *tensors, bias, True, p, causal, False, **how
        )
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            y, *tensors, output, sums, seed, offset, bias, *lengths, p, causal, **how
        )
    else:
        output, sums, seed, offset = aten._scaled_dot_product_efficient_attention(
            *tensors, bias, True, p, causal, **how
        )
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            y, *tensors, bias, output, sums, seed, offset, p, [True, True, True, False], causal, **how
        )
    if dk.shape[1] != kv_heads:
        dk, dv = (one.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for one in (dk, dv))
    return dq, dk, dv


def _bias(mask: Tensor | None, query: Tensor, keys: int, kernel: SDPBackend) -> Tensor | None:
    """Return what a kernel adds to the scores, in memory in which every row begins at a multiple of 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        lowest = _LOWEST if kernel == CUDNN else -math.inf
        mask = torch.where(mask, 0.0, torch.full((), lowest, dtype=query.dtype, device=query.device))
    bias = mask.to(query.dtype)
    if bias.stride(-1) != 1 or keys % _ALIGNED or any(stride % _ALIGNED for stride in bias.stride()[:-1]):
        bias = F.pad(bias, (0, -keys % _ALIGNED)).narrow(-1, 0, keys)
    return bias.expand(*query.shape[:3], keys)

"""The noise of packed attention: exact for values, simulated for queries and keys.

Values enter the gradients linearly. With w = scale² / 12 of a value's group, the variance of its elements given the
stored scales, P the probabilities and k̄ᵢ = Σⱼ Pᵢⱼ kⱼ, packing the values alone adds

    E‖dQ̂ − dQ‖² = s² Σᵢⱼ Pᵢⱼ² ‖kⱼ − k̄ᵢ‖² Σ_c wⱼ_c dOᵢ_c²
    E‖dK̂ − dK‖² = s² Σ_l Σ_c w_l_c Σⱼ ‖Σᵢ Pᵢⱼ (1[j = l] − Pᵢ_l) qᵢ dOᵢ_c‖²

with s the scale of the scores, and nothing to dV. Both follow from dŜᵢⱼ − dSᵢⱼ = Pᵢⱼ (eᵢⱼ − Σ_l Pᵢ_l eᵢ_l), where
eᵢⱼ = ⟨dOᵢ, εⱼ⟩ and the errors ε of elements are uncorrelated.

Queries and keys pass through softmax: there is no closed form, and a small bias. :func:`simulate_attention` measures
both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear._support.validation import check_integer
from rmm_linear.ops.attention import attention_backward, pack_attention
from rmm_linear.packing import element_variance
from rmm_linear.packing.attention import AttentionSpec, additive, attention_rows, check_attention_bits
from rmm_linear.packing.attention_gradients import attention_gradients
from rmm_linear.sketches.seeds import mix

_GROUPS = 20  # of draws, between which the bias is estimated


def value_variance(
    query: Tensor,
    key: Tensor,
    grad_output: Tensor,
    scales: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the variance that packed values add to the gradients of exact queries and keys, given the stored scales.

    Takes T³ · d · dv operations for each sequence and head.

    Args:
        query: Shape (B, h, Tq, d).
        key: Shape (B, hk, Tk, d).
        grad_output: dO, shape (B, h, Tq, dv).
        scales: Of the packed values, (B · Tk, hk · dv), as :func:`rmm_linear.packing.pack` returns them: uint8, shape
            (B · Tk, ⌈hk · dv / 64⌉).
        scale: Factor of the scores.
        mask: Bool or additive, of a shape that (B, h, Tq, Tk) broadcasts with, or None.
        is_causal: Whether query i sees the keys 0 … i only.

    Returns:
        E‖dQ̂ − dQ‖² and E‖dK̂ − dK‖² over all sequences, float64.
    """
    (batch, heads, queries, _), (_, kv_heads, keys, _) = query.shape, key.shape
    scores = scale * query.double() @ key.double().repeat_interleave(heads // kv_heads, 1).transpose(-1, -2)
    if is_causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    scores = scores if mask is None else scores + additive(mask, torch.float64)
    # Heads of queries that share a head of keys are more queries of that head.
    p, q, y = (
        tensor.double().unflatten(1, (kv_heads, -1)).flatten(2, 3)
        for tensor in (scores.softmax(-1), query, grad_output)
    )
    k, columns = key.double(), kv_heads * grad_output.shape[-1]
    w = element_variance(scales, columns)
    w = w.view(batch, keys, kv_heads, -1).transpose(1, 2)
    spread = (k.unsqueeze(2) - (p @ k).unsqueeze(3)).square().sum(-1)
    of_query = (p.square() * spread * (y.square() @ w.transpose(-1, -2))).sum()
    of_key = query.new_zeros((), dtype=torch.float64)
    own = torch.eye(keys, dtype=torch.float64, device=query.device)
    for other in range(keys):
        weights = p * (own[other] - p[..., other : other + 1])
        sums = torch.einsum("bhij,bhid,bhic->bhjdc", weights, q, y)
        of_key += (sums.square().sum((2, 3)) * w[:, :, other]).sum()
    return scale**2 * of_query, scale**2 * of_key


@dataclass(frozen=True)
class AttentionNoise:
    """Noise and bias of one gradient of a packed attention, by simulation.

    Attributes:
        variance: E‖dX̂ − E dX̂‖².
        bias: ‖E dX̂ − dX‖², estimated without bias; may be below 0.
        standard_error: Standard error of ``bias``.
        exact: ‖dX‖².
    """

    variance: float
    bias: float
    standard_error: float
    exact: float


def simulate_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    *,
    bits: int = 4,
    value_bits: int | None = None,
    draws: int = 200,
    scale: float | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    seed: int = 0,
) -> tuple[AttentionNoise, AttentionNoise, AttentionNoise]:
    """Pack queries, keys and values many times, and compare their gradients with the exact ones.

    The draws are cut into 20 groups. The mean inner product of the mean errors of two groups has the mean ‖bias‖²,
    whatever the noise is.

    Args:
        query: Shape (B, h, Tq, d).
        key: Shape (B, hk, Tk, d).
        value: Shape (B, hk, Tk, dv).
        grad_output: dO, shape (B, h, Tq, dv).
        bits: Bits of queries, keys and values: 8 or 4.
        value_bits: Those of values, if they have others.
        draws: How often they are packed, rounded up to a multiple of 20.
        scale: Factor of the scores; None is 1 / √d.
        mask: Bool or additive, shape (B or 1, h or 1, Tq, Tk), or None.
        is_causal: Whether query i sees the keys 0 … i only.
        seed: Seed of the first draw.

    Returns:
        Noise of the gradients of queries, keys and values.
    """
    widths = bits, bits, bits if value_bits is None else value_bits
    for width in widths:
        check_attention_bits(width)
    check_integer("draws", draws)
    spec = AttentionSpec(
        key.shape[2], key.shape[1], key.shape[3], key.shape[3] ** -0.5 if scale is None else scale, is_causal
    )
    y, each = grad_output.transpose(1, 2), -(-draws // _GROUPS)
    parts = [part.double() for part in attention_rows(query, key, value)]
    q, k, v = (lambda begin, end, part=part: part[begin:end] for part in parts)
    exact = attention_gradients(y.double(), (q, k, v), spec, mask)
    means = [part.new_zeros(_GROUPS, part.numel()) for part in exact]
    squares = [0.0, 0.0, 0.0]
    for draw in range(each * _GROUPS):
        stored = pack_attention(query, key, value, None, None, mix(seed, draw), *widths)
        found = attention_backward(y, stored, mask, None, None, None, spec, widths)[:3]
        for i, (one, wanted) in enumerate(zip(found, exact, strict=True)):
            error = (one.double() - wanted).flatten()
            means[i][draw % _GROUPS] += error / each
            squares[i] += float(error.square().sum())
    dq, dk, dv = (
        _noise(mean, square / (each * _GROUPS), float(wanted.square().sum()))
        for mean, square, wanted in zip(means, squares, exact, strict=True)
    )
    return dq, dk, dv


def _noise(means: Tensor, square: float, exact: float) -> AttentionNoise:
    products = (means @ means.T)[tuple(torch.triu_indices(_GROUPS, _GROUPS, 1))]
    bias = float(products.mean())
    return AttentionNoise(square - bias, bias, float(products.std()) / len(products) ** 0.5, exact)

"""Variance of the gradients that norms compute from a packed copy of their normalized input.

With ĥ = h + e as in :mod:`rmm_linear.packing.norms`, the gradient of a row is off by

    dX̂ − dX = −(rstd / H) · (h ⟨e, g⟩ + e ⟨h, g⟩ + e ⟨e, g⟩ − v ∘ g)

The rotation is orthonormal, so the norm of this is the same for rotated h, g and e. There the elements of e are
independent within a row: their random numbers are a xor c, with one a per row and independent c. They are symmetric, so
odd moments are 0, and uniform, so E[e⁴] = 9/5 · v². Summed over the columns of a row,

    E‖dX̂ − dX‖² = (rstd / H)² · [⟨h, g⟩² Σv + ‖h‖² Σv g² + 2 ⟨h, g⟩ Σv h g + Σv · Σv g² − 0.2 Σv² g²]

The error of dγ_j is Σᵢ y_ij e_ij. In the original columns e_j is a rotation of independent errors of the same variance
v, and those of two rows are uncorrelated, so that

    Var(dγ_j) = Σᵢ v_ij y_ij²

Of norms over channels (:mod:`rmm_linear.packing.channel_norms`) a set of M elements takes the place of a row of H. A
group of elements is rotated that may belong to several sets, but all of it has the same v, so that the second moments
are those above in the original elements too; the last term is left out, which is 0.2 / M of the one before it.
Taking out the mean of a set takes out the variance of the sum of errors, (⟨h, g⟩² Σv + Σv · Σv g² + (Σv g)²) / M, for
Σh is 0.

dβ is exact. The formulas hold for the scales that were stored; they depend on the seed a little, so it is an argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.ops.channel_norms import PACK_CHANNELS
from rmm_linear.ops.norms import PACK_NORM
from rmm_linear.packing import RoundingNoise, element_variance
from rmm_linear.packing.channel_norms import packed_shape
from rmm_linear.packing.rounding import rotate_groups


@without_autocast
def norm_input_variance(
    x: Tensor,
    grad_output: Tensor,
    weight: Tensor | None = None,
    *,
    bits: int,
    seed: int,
    eps: float,
    centered: bool = True,
) -> Tensor:
    """Return the variance of the gradient with respect to the input of a norm, for every row.

    Args:
        x: Input, shape (N, H).
        grad_output: Gradient with respect to the output, shape (N, H).
        weight: γ, shape (H,); None is 1.
        bits: Bits per stored element: 8, 4, 3 or 2.
        seed: Seed of the rotation and the rounding.
        eps: What the norm adds to the variance.
        centered: True for LayerNorm, False for RMSNorm.

    Returns:
        E‖dX̂ − dX‖², float64, shape (N,), in squared units of the gradient.

    Example:
        >>> x, y = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.0]])
        >>> norm_input_variance(x, y, bits=2, seed=0, eps=0.0).shape
        torch.Size([1])
    """
    seeds, columns = torch.tensor([seed], device=x.device), x.shape[1]
    v = element_variance(PACK_NORM(x, bits, seeds, eps, centered).scales, columns)
    x = x.double()
    x = x - x.mean(1, keepdim=True) if centered else x
    rstd = (x.square().mean(1, keepdim=True) + eps).rsqrt()
    g = grad_output.double() if weight is None else grad_output.double() * weight.double()
    rotation = RoundingNoise.of(seeds, 0, 0).rotation.double()
    h, g = rotate_groups(x * rstd, rotation), rotate_groups(g, rotation)
    hg = (h * g).sum(1)
    vg = (v * g.square()).sum(1)
    terms = hg.square() * v.sum(1) + h.square().sum(1) * vg + 2 * hg * (v * h * g).sum(1)
    return (rstd.squeeze(1) / columns).square() * (terms + v.sum(1) * vg - 0.2 * (v * g).square().sum(1))


@without_autocast
def norm_weight_variance(
    x: Tensor, grad_output: Tensor, *, bits: int, seed: int, eps: float, centered: bool = True
) -> Tensor:
    """Return the variance of every element of dγ, the gradient with respect to the weight of a norm.

    Args:
        x: Input, shape (N, H).
        grad_output: Gradient with respect to the output, shape (N, H).
        bits: Bits per stored element: 8, 4, 3 or 2.
        seed: Seed of the rotation and the rounding.
        eps: What the norm adds to the variance.
        centered: True for LayerNorm, False for RMSNorm.

    Returns:
        float64, shape (H,), in squared units of the gradient.

    Example:
        >>> x = torch.tensor([[1.0, 3.0]])
        >>> norm_weight_variance(x, torch.tensor([[1.0, 0.0]]), bits=2, seed=0, eps=0.0)[1]
        tensor(0., dtype=torch.float64)
    """
    saved = PACK_NORM(x, bits, torch.tensor([seed], device=x.device), eps, centered)
    return (element_variance(saved.scales, x.shape[1]) * grad_output.double().square()).sum(0)


@without_autocast
def channel_norm_variance(
    x: Tensor,
    grad_output: Tensor,
    weight: Tensor | None = None,
    *,
    bits: int,
    seed: int,
    eps: float,
    groups: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the variances of the gradients of BatchNorm, GroupNorm or InstanceNorm, whose positions lie side by side.

    Args:
        x: Input, shape (N, C, L): L positions for each sample and channel.
        grad_output: Gradient with respect to the output, shape (N, C, L).
        weight: γ, shape (C,); None is 1.
        bits: Bits per stored element: 8, 4, 3 or 2.
        seed: Seed of the rotation and the rounding.
        eps: What the norm adds to the variance.
        groups: Of the channels of a sample; C for InstanceNorm, 0 for BatchNorm.

    Returns:
        E‖dX̂ − dX‖² of every set of elements with the same statistics, shape (C,) or (N · G,), and the variance of every
        element of dγ, shape (C,); float64, in squared units of the gradients.

    Example:
        >>> x = torch.randn(4, 6, 10)
        >>> one, other = channel_norm_variance(x, x.sign(), bits=3, seed=0, eps=1e-5, groups=3)
        >>> one.shape, other.shape
        (torch.Size([12]), torch.Size([6]))
    """
    samples, channels, length = x.shape
    whole = samples, 1, channels, length
    saved = PACK_CHANNELS(x.reshape(whole).contiguous(), bits, torch.tensor([seed], device=x.device), eps, groups)
    v = element_variance(saved.scales, packed_shape(whole)[1]).view(x.shape)
    y = grad_output.double()
    g = y if weight is None else y * weight.double().unsqueeze(1)

    def sets(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).reshape(channels, -1) if groups == 0 else tensor.reshape(samples * groups, -1)

    each, g, of_v = sets(x.double()), sets(g), sets(v)
    each = each - each.mean(1, keepdim=True)
    rstd = (each.square().mean(1, keepdim=True) + eps).rsqrt()
    h, hg, vg = each * rstd, (each * rstd * g).sum(1), (of_v * g.square()).sum(1)
    of_mean = hg.square() * of_v.sum(1) + of_v.sum(1) * vg
    terms = of_mean + h.square().sum(1) * vg + 2 * hg * (of_v * h * g).sum(1)
    terms -= (of_mean + (of_v * g).sum(1).square()) / g.shape[1]
    return (rstd.squeeze(1) / g.shape[1]).square() * terms, (v * y.square()).sum((0, 2))

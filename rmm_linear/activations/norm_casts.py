"""How a norm rounds: which dtype its output has, and whether the normalized rows are rounded before γ.

In half types, nn.LayerNorm and Gemma's RMSNorm round once, at the end; LLaMA's and T5's round the normalized rows
first. A kernel that makes the output must do the same, so a copy of the module is run on a few rows in each dtype.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from rmm_linear.activations.norm_form import NormForm, forward_of
from rmm_linear.packing.norms import normalize

Dtypes = tuple[torch.dtype, torch.dtype | None]  # of the input, and of the parameters
Casts = tuple[torch.dtype, torch.dtype]  # before γ, float32 for none, and of the output

_ELEMENTS, _WIDTH = 4096, 64  # of a probe, at least; columns where the module has no weight and no normalized_shape
_HALF = (torch.float16, torch.bfloat16)
_SHARE = 0.1  # of a last bit: rounding in another order moves a third of the elements by one
_TOLERANCE = 1e-5  # of float32 sums in another order


def casts_of(module: nn.Module, form: NormForm) -> dict[Dtypes, Casts]:
    """Find how a norm rounds, by running a copy of it on the CPU.

    Args:
        module: A norm, converted or not.
        form: What it computes.

    Returns:
        Dtypes of the input and of the parameters to casts, for all of which are known.

    Example:
        >>> casts_of(nn.LayerNorm(8), NormForm(True, 1e-5))[torch.bfloat16, torch.bfloat16]
        (torch.float32, torch.bfloat16)
    """
    has_parameters = any(parameter is not None for parameter in module._parameters.values())
    found: dict[Dtypes, Casts] = {}
    for dtype in (torch.float32, *_HALF):
        for own in dict.fromkeys((dtype, torch.float32) if has_parameters else (None,)):
            casts = _casts(module, form, dtype, own)
            if casts is not None:
                found[dtype, own] = casts
    return found


def _casts(module: nn.Module, form: NormForm, dtype: torch.dtype, own: torch.dtype | None) -> Casts | None:
    forward, copy = forward_of(module), object.__new__(type(module))
    if forward is None:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    shape = next((p.shape for p in module._parameters.values() if p is not None), None)
    shape = shape or getattr(module, "normalized_shape", (_WIDTH,))
    rows = 2 + _ELEMENTS // max(1, torch.Size(shape).numel())
    x = (torch.randn(rows, *shape, generator=generator, device="cpu") + 0.5).to(dtype)
    chosen: dict[str, Tensor | None] = {
        name: None if parameter is None else torch.randn(shape, generator=generator, device="cpu").to(own)
        for name, parameter in module._parameters.items()
    }
    wrapped = {name: None if one is None else nn.Parameter(one, False) for name, one in chosen.items()}
    vars(copy).update({**vars(module), "_parameters": wrapped, "training": False})
    with torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            output = forward(copy, x.clone())
        except Exception:  # of dtypes that the module does not take together
            return None
    if not isinstance(output, Tensor) or output.shape != x.shape or not output.is_floating_point():
        return None
    beta, errors = chosen.get("bias"), {}
    for before in dict.fromkeys((torch.float32, dtype, own or dtype)):
        if before in (torch.float32, *_HALF):
            affine = form.gamma(chosen.get("weight")), None if beta is None else beta.view(-1)
            how = (before, output.dtype), form.eps_of(dtype), form.centered
            expected = normalize(x.flatten(-form.dims), *affine, *how).view(x.shape).double()
            errors[before] = float((output.double() - expected).norm() / expected.norm())
    before = min(errors, key=lambda one: errors[one])
    limit = _TOLERANCE + (_SHARE * torch.finfo(output.dtype).eps if output.dtype in _HALF else 0.0)
    return (before, output.dtype) if errors[before] <= limit else None

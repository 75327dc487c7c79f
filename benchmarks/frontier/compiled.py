"""The step as torch.compile makes it, and inductor's pass that saves activations in 8 bits.

Source: PyTorch 2.13, ``torch/_functorch/partitioners.py``, ``activation_quantization_aten_pass``: what a compiled graph
saves for the backward pass is divided by the largest magnitude of its row (of the last dimension) and rounded to the
nearest float8 number. The error is the same for the same numbers: the gradient is biased. Of their settings, e4m3 with
scales, for tensors of any size and of float32 too; parameters stay. Ours is nothing but the call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

_PASS = {
    "quant_type": "torch.float8_e4m3fn",
    "use_scaling": True,
    "size_in_mb": 0.0,  # 100 by default, which nothing here has
    "exclude_primals": True,
    "allowed_dtypes": "torch.float32;torch.bfloat16",
}


def use_compiled(model: nn.Module, quantized: bool = False) -> None:
    """Compile the forward and the backward pass of training steps, of batches of any shape; evaluation stays eager."""
    # Dropout then has the masks that it has without.
    options: dict[str, Any] = {"fallback_random": True}
    if quantized:
        options["post_grad_fusion_options"] = {"activation_quantization_aten_pass": _PASS}
    forward = model.forward
    compiled = torch.compile(forward, dynamic=True, options=options)

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else forward)(*args, **kwargs)

    model.forward = called  # pyright: ignore[reportAttributeAccessIssue]

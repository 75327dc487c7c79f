"""Which code runs: plain PyTorch, its compiled form on CPU, or the Triton kernels."""

from __future__ import annotations

import os

BACKENDS = ("auto", "torch", "triton")
_VARIABLE = "RMM_BACKEND"


def requested_backend() -> str:
    """Read the environment variable RMM_BACKEND.

    Returns:
        "auto" (the fastest for the device), "torch" (plain PyTorch everywhere) or "triton" (the kernels, on CPU in
        Triton's interpreter, which TRITON_INTERPRET=1 turns on).

    Raises:
        ValueError: If the variable holds something else.
    """
    name = os.environ.get(_VARIABLE, "auto")
    if name not in BACKENDS:
        raise ValueError(f"{_VARIABLE} must be {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {name!r}.")
    return name

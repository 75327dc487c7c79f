"""Sublayers that are recomputed from a low-rank stand-in of their input, in training with LoRA.

Source: Shi et al. 2025, "LoRAct" (arXiv 2509.23472), and their code (github.com/shijxcs/meft, ``patch_locations``
"sublayer"). What attention and MLP need is recomputed from the output of the norm before them, of which A ≈ (AQ)Qᵀ is
kept: Q is an orthonormal basis of the columns of AᵀA that belong to k columns of A chosen at random, their "sampling-
based orthogonal decomposition". It is made online, in every forward pass, and biased. Theirs is the rank, an eighth of
the width. Ours is what follows from RoBERTa's norms, which come after the sublayers: a norm is recomputed with the
sublayer that it ends, where theirs is differentiated from its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from benchmarks.library import mix

SHARE = 1 / 8


@torch.no_grad()
def low_rank(a: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is near a matrix, and has a rank at most."""
    tall = a.shape[0] > a.shape[1]
    rows = a if tall else a.T
    chosen = torch.randperm(rows.shape[1], generator=generator)[:rank].to(a.device)
    basis = torch.linalg.qr((rows.T @ rows[:, chosen]).float()).Q.to(a.dtype)
    projected = rows @ basis
    return (projected, basis.T.contiguous()) if tall else (basis, projected.T.contiguous())


class LowRank:
    """Hooks that keep tensors of (sequences, tokens, width) in two factors."""

    def __init__(self, share: float) -> None:
        self.share, self.seed, self.calls = share, int(torch.randint(2**62, ())), 0

    def pack(self, tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or tensor.dim() != 3:
            return tensor
        self.calls += 1  # numbers drawn from PyTorch's own generator would shift the masks of dropout
        generator = torch.Generator().manual_seed(mix(self.seed, self.calls))
        rank = max(1, int(self.share * tensor.shape[-1]))
        return *low_rank(tensor.detach().flatten(0, 1), rank, generator), tensor.shape

    def unpack(self, kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else (kept[0] @ kept[1]).view(kept[2])

    def recomputed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Make a forward that keeps its input in two factors, and nothing else."""

        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with saved_tensors_hooks(self.pack, self.unpack):
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return called


def use_loract(model: nn.Module, share: float = SHARE) -> None:
    """Recompute attention and MLP of every layer from low-rank inputs."""
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "feed_forward_chunk")]
    if not layers:
        raise ValueError("LoRAct is written for layers with attention and feed_forward_chunk; the model has none.")
    hooks = LowRank(share)
    for layer in layers:
        layer.attention.forward = hooks.recomputed(layer.attention.forward)
        layer.feed_forward_chunk = hooks.recomputed(layer.feed_forward_chunk)

"""Inputs in a principal and a random subspace, as published.

Source: Li, Zhang and Fang 2026, "PRAC" (arXiv 2602.23111), algorithms 1 and 2. Of an input X, shape (N, n), two
projections are kept: XQ₁ on its first r₁ right singular vectors, and kXQ₂ on r₂ directions that are drawn uniformly
from their orthogonal complement (equation 5). X̃ = XQ₁Q₁ᵀ + kXQ₂Q₂ᵀ with k = (n − r₁) / r₂ is unbiased (theorem 6), and
E‖X̃ − X‖² = (k − 1)‖X − XQ₁Q₁ᵀ‖² (theorem 15). Both subspaces are made again every so many steps, and layers that read
one input share them. Theirs are the ranks: r₁ = r₂ = 2 every 200 steps for RoBERTa on GLUE (table 8), 0.3 n in linear
layers and 0.2 n in norms and GELU every 500 steps for training from scratch (section 6.1). Ours is the way to the
singular vectors, by the eigenvectors of the smaller of XXᵀ and XᵀX. No code of theirs was found.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.library import mix
from benchmarks.suites.paper import HEAD

Compressed = tuple[Tensor, Tensor, Tensor, Tensor]  # XQ₁, kXQ₂, Q₁ and Q₂


class Subspaces(nn.Module):
    """The two subspaces of one input, which are made again in every ``interval``-th call."""

    principal: Tensor | None
    random: Tensor | None

    def __init__(self, rank: float, interval: int) -> None:
        """``rank`` is that of either subspace: a number of directions, or a share of them."""
        super().__init__()
        self.rank, self.interval = rank, interval
        # Seeds of its own: drawn on the way, they would shift the masks of dropout behind the layer.
        self.seed, self.calls = int(torch.randint(2**62, ())), 0
        self.register_buffer("principal", None, persistent=False)
        self.register_buffer("random", None, persistent=False)

    @torch.no_grad()
    def compress(self, x: Tensor) -> Compressed:
        """Project X, shape (N, n)."""
        width = x.shape[1]
        rank = int(self.rank * width) if self.rank < 1 else int(self.rank)
        if self.calls % self.interval == 0:
            rows = x.float()
            principal = _singular_vectors(rows, rank)
            generator = torch.Generator(x.device).manual_seed(mix(self.seed, self.calls))
            drawn = torch.randn(width, rank, generator=generator, device=x.device)
            drawn = drawn - principal @ (principal.T @ drawn)
            # To the last bit of what is left of Q₁ after the first subtraction.
            drawn = torch.linalg.qr(drawn - principal @ (principal.T @ drawn)).Q
            self.principal, self.random = principal.to(x.dtype), drawn.to(x.dtype)
        self.calls += 1
        first, second = self.principal, self.random
        assert first is not None  # noqa: S101 made in the first call
        assert second is not None  # noqa: S101
        return x @ first, x @ second * ((width - rank) / rank), first, second


def _singular_vectors(x: Tensor, rank: int) -> Tensor:
    """Return the first right singular vectors as columns."""
    if rank < len(x) < x.shape[1]:
        vectors = x.T @ torch.linalg.eigh(x @ x.T).eigenvectors[:, -rank:]
        return torch.linalg.qr(vectors.flip(1)).Q
    return torch.linalg.eigh(x.T @ x).eigenvectors[:, -rank:].flip(1)


class Sharing:
    """The input that was compressed last: query, key and value have one."""

    def __init__(self) -> None:
        self._source: Any = lambda: None
        self._version, self._readers = 0, set[Subspaces]()
        self._compressed: Compressed | None = None

    def compress(self, subspaces: Subspaces, input: Tensor) -> Compressed:
        """Project an input for one of its layers, which has the subspaces if it is the first to read it."""
        is_there = self._source() is input and self._version == input._version and subspaces not in self._readers
        if self._compressed is None or not is_there:
            self._compressed = subspaces.compress(input.detach().reshape(-1, input.shape[-1]))
            self._source, self._version = weakref.ref(input, self._forget), input._version
            self._readers.clear()
        self._readers.add(subspaces)
        return self._compressed

    def _forget(self, source: Any) -> None:
        if self._source is source:
            self._compressed = None


class _Layer(nn.Module):
    """A layer that keeps its input in two subspaces."""

    weight: Any
    bias: Any

    def __init__(self, layer: nn.Module, subspaces: Subspaces, sharing: Sharing) -> None:
        super().__init__()
        self.subspaces, self._sharing = subspaces, sharing
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        self.shape, self.eps = getattr(layer, "normalized_shape", ()), getattr(layer, "eps", 0.0)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (getattr(self, name, None) for name in ("weight", "bias"))
        if not torch.is_grad_enabled():
            return self.run(input, weight, bias)[0]
        return _Function.apply(input, weight, bias, self, self._sharing.compress(self.subspaces, input))

    def run(self, x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, ...]:
        """Return the output, and what the backward pass needs besides X̃ and the parameters."""
        raise NotImplementedError

    def gradients(self, y: Tensor, x: Tensor, weight: Any, bias: Any, *others: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the parameters, from that of the output and from X̃."""
        raise NotImplementedError


class PracLinear(_Layer):
    """A linear layer; the gradient of its input is exact."""

    def run(self, x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, ...]:
        return (F.linear(x, weight, bias),)

    def gradients(self, y: Tensor, x: Tensor, weight: Any, bias: Any, *others: Tensor) -> tuple[Tensor | None, ...]:
        flat = y.reshape(-1, y.shape[-1])
        return y @ weight, flat.T @ x.reshape(-1, x.shape[-1]), None if bias is None else flat.sum(0)


class PracNorm(_Layer):
    """LayerNorm; mean and deviation are kept as they are. dX has X̃ twice, and a bias."""

    def run(self, x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, ...]:
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def gradients(self, y: Tensor, x: Tensor, weight: Any, bias: Any, *others: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [True, weight is not None, bias is not None]
        backward = torch.ops.aten.native_layer_norm_backward
        return backward(y.contiguous(), x.contiguous(), self.shape, *others, weight, bias, wanted)


class PracGELU(_Layer):
    """GELU, whose derivative is that at X̃, which has a bias."""

    def run(self, x: Tensor, weight: Any, bias: Any) -> tuple[Tensor, ...]:
        return (F.gelu(x),)

    def gradients(self, y: Tensor, x: Tensor, weight: Any, bias: Any, *others: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.aten.gelu_backward(y, x), None, None


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, layer: _Layer, compressed: Compressed) -> Tensor:
        output, *others = layer.run(x, weight, bias)
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(*compressed, weight, bias, *others)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        first, second, principal, random, weight, bias, *others = ctx.saved_tensors
        x = torch.addmm(first @ principal.T, second, random.T).view(ctx.shape)
        return *ctx.layer.gradients(grad_outputs[0], x, weight, bias, *others), None, None


def use_prac(model: nn.Module, rank: float, interval: int, others: float | None = None) -> None:
    """Keep inputs of linear layers in two subspaces of a rank, and those of norms and GELU of another one.

    Those of the head, which see one row per sequence, are left as they are.
    """
    sharing = Sharing()
    kinds: dict[type[nn.Module], tuple[type[_Layer], float | None]]
    kinds = {nn.Linear: (PracLinear, rank), nn.LayerNorm: (PracNorm, others)}
    for parent_name, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            is_gelu = type(child).__name__ == "GELUActivation"
            kind, share = (PracGELU, others) if is_gelu else kinds.get(type(child), (_Layer, None))
            if share is not None and HEAD not in (*parent_name.split("."), name):
                setattr(parent, name, kind(child, Subspaces(share, interval), sharing).train(child.training))

"""Fixed directions: a few coordinates of a layer's input that are saved in 8 bits, so that the rest has less to code.

    X = C Bᵀ + R    C = X B (N, k)    X̂ = Ĉ Bᵀ + R̂    dW = YᵀR̂ + (YᵀĈ) Bᵀ

B (I, k) is orthonormal and known before the step, so the estimate is unbiased whatever B is. Rows of transformers have
half to three quarters of their energy in 16 directions, which change slowly: what a batch had is found again in later
ones. B is refreshed in the forward passes 1, 2, 4, 8, … of a layer, and in every 512th, by a step of subspace
iteration, B ← orth(XᵀX B), and what a pass has shown is used from the next step on.

Costs: three products of N · I · k beside the three of N · I · O that the layer has anyway; I · k numbers per layer for
good, and (8 k + 8 ⌈k/64⌉) / I bits per element. The first pass has k random directions, so that every step saves as
much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from rmm_linear.context.surroundings import in_backward
from rmm_linear.sketches.seeds import is_capturing

_LONGEST = 512
_LEAST_SHARE = 16  # columns for each direction: with fewer, coordinates cost more than they save


@dataclass
class Directions:
    """The basis of one layer's input."""

    count: int  # k
    basis: Tensor | None = None  # B, float32, shape (I, k), orthonormal; None before the first step
    calls: int = 0  # forward passes until now
    is_learning: bool = True  # whether it is refreshed
    pending: Tensor | None = field(default=None, compare=False)  # the basis of the steps to come

    def fits(self, features: int) -> bool:
        return 0 < self.count * _LEAST_SHARE <= features

    def see(self, x: Tensor, index: Tensor | None, known: Tensor) -> None:
        """Look at an input (N, I) in a forward pass that used the basis ``known``; index: its rows that are saved."""
        self.calls += 1
        if self.calls & (self.calls - 1) and self.calls % _LONGEST:
            return
        rows = (x if index is None else x.index_select(0, index)).float()
        if self.calls == 1:  # random: one step of subspace iteration more
            known = rows.T @ (rows @ known)
        found, _ = torch.linalg.qr(rows.T @ (rows @ known))
        if bool(found.isfinite().all()):
            self.pending = found

    def basis_for(self, x: Tensor, index: Tensor | None) -> Tensor | None:
        """Return the basis for an input, and look at that input in a forward pass that is no recomputation."""
        if is_capturing(x.device):
            return None  # a graph that is captured can read nothing, and would repeat this basis for good
        basis, mode = self.basis, x.fake_mode if isinstance(x, FakeTensor) else None
        if basis is None or basis.shape[0] != x.shape[1] or (basis.device != x.device and mode is None):
            if in_backward():
                return None  # a reentrant checkpoint, whose first pass saves nothing and learns nothing
            if mode is not None:
                return x.new_empty(x.shape[1], self.count, dtype=torch.float32)
            with _disable_current_modes():
                basis = self.basis = self._first(x)
                self.calls, self.pending = 0, None
        elif mode is not None and not mode.allow_non_fake_inputs:
            return mode.from_tensor(basis)
        if self.is_learning and not in_backward() and mode is None:
            with _disable_current_modes():  # a selective checkpoint counts the operators, and must find them again
                self.see(x, index, basis)
        return basis

    def _first(self, x: Tensor) -> Tensor:
        """Make the random directions of the first step."""
        if x.device.type == "meta":
            return x.new_empty(x.shape[1], self.count, dtype=torch.float32)
        generator = torch.Generator("cpu").manual_seed(self.count)
        shape, dtype = (x.shape[1], self.count), torch.float32
        return torch.linalg.qr(torch.randn(shape, generator=generator, dtype=dtype, device="cpu"))[0].to(x.device)

    def load(self, basis: Tensor, calls: int, features: int) -> None:
        """Go on from a saved basis of so many columns of the input."""
        if tuple(basis.shape) != (features, self.count) or not bool(basis.isfinite().all()) or calls < 0:
            expected = f"({features}, {self.count})"
            raise ValueError(f"a basis must be finite, of the shape {expected}, got {tuple(basis.shape)}")
        self.basis, self.calls, self.pending = basis.float(), calls, None

    def settle(self) -> None:
        """Use what was seen, between steps."""
        if self.pending is not None:
            self.basis, self.pending = self.pending, None

"""RMMConv1D: GPT-2's Conv1D (a linear layer with a transposed weight) that saves a sketch of its input.

Imports transformers; the library loads this module only when a model holds such a layer.
"""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rmm_linear.layers.linear import SketchedLayer


class RMMConv1D(SketchedLayer, Conv1D):
    """A drop-in for transformers' ``Conv1D``; :class:`rmm_linear.RMMLinear` says what is exact and what is random."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to activations of shape (*, I)."""
        # Two dimensions, as in Conv1D, so that the output is the same to the bit.
        flat, shape = x.reshape(-1, x.shape[-1]), tuple(x.shape[:-1])
        return self._linear(flat, self.weight.t(), self.bias, shape).view(*shape, self.nf)

    def __repr__(self) -> str:
        return f"RMMConv1D(nf={self.nf}, nx={self.nx}, {self._describe()})"

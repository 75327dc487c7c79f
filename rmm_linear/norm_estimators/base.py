"""What a norm estimator is, and the call of a layer that it is asked about.

Row sampling with importance (norm_rows, wta) draws token i with a probability ∝ ‖xᵢ‖·ŷᵢ. The noise of norm_rows is
least where ŷᵢ² is the mean of ‖yᵢ‖² over all that is not known in the forward pass: Σᵢ ‖xᵢ‖² E‖yᵢ‖²/pᵢ has its least
value where pᵢ ∝ ‖xᵢ‖ √E‖yᵢ‖². So estimators average squares. A wrong ŷ adds noise and never a bias, because p is fixed
before the rows are drawn. Sums of squares have one sign, and nothing is subtracted from them: float32 is enough.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rmm_linear.sketches import TokenMask


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of one layer, as an estimator sees it.

    Attributes:
        shape: Leading dimensions of the layer's input, (batch, sequence) as a rule; their product is N.
        device: Where the input is.
        input_ids: Token ids, integers of shape (N,), on the device; None where they are not known.
        sample_index: Numbers of the batch's examples in the data set, int64 of shape (batch,), on the CPU; or None.
        mask: The tokens that count, or None for all.
    """

    shape: tuple[int, ...]
    device: torch.device
    input_ids: Tensor | None = None
    sample_index: Tensor | None = None
    mask: TokenMask | None = None

    @property
    def tokens(self) -> int:
        """N."""
        return prod(self.shape)

    @property
    def valid(self) -> Tensor:
        """True for the tokens that count, shape (N,)."""
        if self.mask is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        return self.mask.valid

    def places(self) -> Tensor | None:
        """Number the tokens of each sequence from 0 on; padding in front does not count.

        Returns:
            int64, shape (N,), whatever for tokens that do not count; None where the sequences are not known.

        Example:
            >>> LayerCall((2, 3), torch.device("cpu")).places()
            tensor([0, 1, 2, 0, 1, 2])
        """
        if len(self.shape) < 2:
            return None
        if self.mask is None:
            return torch.arange(prod(self.shape[1:]), device=self.device).repeat(self.shape[0])
        return (self.valid.view(self.shape[0], -1).cumsum(1) - 1).clamp_min(0).view(-1)


class NormEstimator(abc.ABC):
    """Says in the forward pass what to expect of ‖yᵢ‖, and learns from every backward pass.

    One object serves one layer of one process: under distributed training every rank learns from its own batches. It is
    copied and pickled with the model, and it is no module: parameters and state_dict stay those of the original model.
    """

    @abc.abstractmethod
    def predict(self, call: LayerCall) -> Tensor | None:
        """Return ŷ. Called once for every sketch; nothing should wait for the device here.

        Args:
            call: The call of the layer.

        Returns:
            Not negative, float32, shape (N,), on the call's device; values of tokens that do not count are not looked
            at. None where nothing is known: then the input's norms alone decide. Only relative values matter, except
            between layers that share one sketch, whose ŷ² are added.
        """

    @abc.abstractmethod
    def observe(self, call: LayerCall, norms: Tensor) -> None:
        """Learn from a backward pass.

        Args:
            call: The call of the layer.
            norms: ‖yᵢ‖, float32, shape (N,), finite. All zero where a step shows nothing: above a layer that starts
                from zero, as LoRA's B does, or when the gradients have overflowed.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold.

        Returns:
            Tensors by name; empty where nothing was learned.
        """
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the place of an estimator whose :meth:`tensors` these are.

        Args:
            tensors: Tensors by name.

        Raises:
            ValueError: If they are not such tensors; then nothing changes.
        """
        if tensors:
            raise ValueError(f"{type(self).__name__} has no tensors to load, got {', '.join(tensors)}.")

    @property
    def bytes(self) -> int:
        """Bytes that the state takes, wherever it is."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


class RelativeEstimator(NormEstimator):
    """An estimator that learns ‖yᵢ‖² relative to its mean over the step's tokens.

    Losses shrink during training and loss scaling changes their unit, so absolute norms of different steps do not
    compare. The layer's own unit, which siblings need, is a running root mean square of its own.

    Args:
        decay: What one step leaves of the weight of those before, in (0, 1]; 1 counts all steps alike.
    """

    def __init__(self, decay: float) -> None:
        """Know nothing."""
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay!r}. Use decay=1 to count all steps alike.")
        self.decay = decay
        self._unit: Tensor | None = None  # float32: the weighted sum of the steps' mean squares' roots; their weight

    def predict(self, call: LayerCall) -> Tensor | None:
        """Return what is known, in the layer's unit.

        Args:
            call: The call of the layer.

        Returns:
            ŷ, or None.
        """
        if self._unit is None or (relative := self._recall(call)) is None:
            return None
        unit = self._unit = self._unit.to(call.device)
        # Steps that showed nothing leave a tiny unit: alike for all tokens, and nothing beside a sibling that has seen.
        return relative.sqrt() * (unit[0] / unit[1].clamp_min(1e-6)).clamp_min(1e-30)

    def observe(self, call: LayerCall, norms: Tensor) -> None:
        """Learn the step's relative squares, unless all are zero.

        Args:
            call: The call of the layer.
            norms: ‖yᵢ‖, shape (N,).
        """
        if not norms.numel():
            return
        real = call.valid
        norms = torch.where(real, norms, 0)
        top = norms.amax()
        seen = top > 0
        squares = (norms / torch.where(seen, top, 1)).square()  # of the largest 1: the squares themselves may overflow
        mean = squares.sum() / real.sum().clamp_min(1)
        fade = torch.where(seen, self.decay, 1.0)
        self._learn(call, squares / torch.where(seen, mean, 1), (real & seen).float(), fade)
        step = torch.stack((top * mean.sqrt(), seen.float()))
        self._unit = step if self._unit is None else self._unit.to(call.device) * fade + step

    @abc.abstractmethod
    def _recall(self, call: LayerCall) -> Tensor | None:
        """Return the relative squares, shape (N,), or None."""

    @abc.abstractmethod
    def _learn(self, call: LayerCall, squares: Tensor, weights: Tensor, fade: Tensor) -> None:
        """Take the relative squares of a step; weights are 1 for tokens that show something; fade is the decay."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold.

        Returns:
            "unit", and what the estimator adds.
        """
        return {} if self._unit is None else {"unit": self._unit}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the place of an estimator whose :meth:`tensors` these are.

        Args:
            tensors: Tensors by name.

        Raises:
            ValueError: If they are not such tensors.
        """
        unit = tensors.get("unit")
        if tensors and (unit is None or unit.dtype != torch.float32 or unit.shape != (2,) or not _are_sums(unit)):
            raise ValueError("unit must be two finite float32 numbers of at least 0.")
        self._unit = None if unit is None else unit.clone()


def check_tensors(estimator: NormEstimator, tensors: dict[str, Tensor], optional: tuple[str, ...]) -> None:
    """Refuse tensors that an estimator cannot have written: other names, other dtypes, values that are no sums.

    Args:
        estimator: Who loads them.
        tensors: Tensors by name; none is what an estimator writes that has learned nothing.
        optional: Names beside "unit", of float32.

    Raises:
        ValueError: If they are others.
    """
    kind = type(estimator).__name__
    if unknown := sorted(set(tensors) - {"unit", *optional}):
        raise ValueError(f"{kind} has the tensors unit, {', '.join(optional)}; got {', '.join(unknown)}.")
    for name in set(tensors) & set(optional):
        if tensors[name].dtype != torch.float32 or not _are_sums(tensors[name]):
            raise ValueError(f"{name} of {kind} must hold finite float32 numbers of at least 0.")


def _are_sums(tensor: Tensor) -> bool:
    return bool((tensor.isfinite() & (tensor >= 0)).all())

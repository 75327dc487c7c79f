"""The interface of norm estimators, and the layer call that they predict and observe.

Importance sampling of rows (norm_rows, wta) samples token i with a probability ∝ ‖xᵢ‖·ŷᵢ. The variance of norm_rows,
Σᵢ ‖xᵢ‖² E‖yᵢ‖²/pᵢ, is smallest for pᵢ ∝ ‖xᵢ‖ √E‖yᵢ‖², so the best ŷᵢ² is the mean of ‖yᵢ‖² over everything that is not
known in the forward pass, and estimators average squares. A wrong ŷ adds variance but no bias, because p is fixed
before the rows are sampled. Sums of squares have one sign, and nothing is subtracted from them: float32 is enough.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rmm_linear.sketches import TokenMask


@dataclass(eq=False)  # frozen, it would take a microsecond more
class LayerCall:
    """One call of one layer, as an estimator sees it.

    Attributes:
        shape: Leading dimensions of the layer's input, usually (batch, sequence); their product is N.
        device: Device of the input.
        input_ids: Token ids, integers of shape (N,), on the device; None if they are not known.
        sample_index: Indices of the batch's examples in the data set, int64 of shape (batch,), on the CPU; or None.
        mask: The valid tokens, or None for all.
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
        """True for the valid tokens, shape (N,)."""
        if self.mask is None:
            return torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        return self.mask.valid

    def places(self) -> Tensor | None:
        """Number the valid tokens of each sequence from 0 on; padding in front is not counted.

        Returns:
            int64, shape (N,), arbitrary for masked tokens; None if the sequences are not known.

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
    """Predicts ‖yᵢ‖ in the forward pass and observes it in every backward pass.

    One object serves one layer of one process: under distributed training every rank learns from its own batches. It is
    copied and pickled with the model. It is not an ``nn.Module``, so parameters and state_dict stay those of the
    original model.
    """

    @abc.abstractmethod
    def predict(self, call: LayerCall) -> Tensor | None:
        """Return ŷ. Called once for every sketch; avoid synchronizing with the device here.

        Args:
            call: The call of the layer.

        Returns:
            Not negative, float32, shape (N,), on the call's device; values of masked tokens are ignored. None if
            nothing is known yet: then the norms of the input alone decide. Only relative values matter, except
            between layers that share one sketch, whose ŷ² are added.
        """

    @abc.abstractmethod
    def observe(self, call: LayerCall, norms: Tensor) -> None:
        """Learn from a backward pass.

        Args:
            call: The call of the layer.
            norms: ‖yᵢ‖, float32, shape (N,), finite. All zero in steps that carry no information: above a layer that
                starts from zero, as LoRA's B does, or when the gradients have overflowed.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint must contain.

        Returns:
            Tensors by name; empty if nothing was learned.
        """
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that :meth:`tensors` returned.

        Args:
            tensors: Tensors by name.

        Raises:
            ValueError: If the tensors are not a state of this estimator; then nothing changes.
        """
        if tensors:
            raise ValueError(f"{type(self).__name__} has no tensors to load, got {', '.join(tensors)}.")

    @property
    def bytes(self) -> int:
        """Size of the state in bytes, on any device."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


class RelativeEstimator(NormEstimator):
    """An estimator that learns ‖yᵢ‖² relative to its mean over the tokens of the step.

    Losses shrink during training and loss scaling changes their unit, so absolute norms of different steps cannot be
    compared. The scale of the layer, which layers that share a sketch need, is a separate running root mean square.

    Args:
        decay: Factor on the weight of earlier steps at every step, in (0, 1]; 1 weights all steps equally.
    """

    def __init__(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {decay!r}. Use decay=1 to count all steps alike.")
        self.decay = decay
        self._unit: Tensor | None = None  # float32 (2,): weighted sum of the steps' root mean squares; weights

    def predict(self, call: LayerCall) -> Tensor | None:
        """Return ŷ in the scale of the layer, or None before the first observation."""
        if self._unit is None or (relative := self._recall(call)) is None:
            return None
        unit = self._unit = self._unit.to(call.device)
        # If all steps so far had zero gradients, the scale is tiny: equal for all tokens, and negligible compared with
        # the ŷ of other layers that share the sketch.
        return relative.sqrt() * (unit[0] / unit[1].clamp_min(1e-6)).clamp_min(1e-30)

    def observe(self, call: LayerCall, norms: Tensor) -> None:
        """Learn the relative squares of the step, unless all are zero."""
        if not norms.numel():
            return
        valid = call.valid
        norms = torch.where(valid, norms, 0)
        top = norms.amax()
        seen = top > 0
        squares = (norms / torch.where(seen, top, 1)).square()  # divided by the largest: unscaled squares may overflow
        mean = squares.sum() / valid.sum().clamp_min(1)
        fade = torch.where(seen, self.decay, 1.0)
        self._learn(call, squares / torch.where(seen, mean, 1), (valid & seen).float(), fade)
        step = torch.stack((top * mean.sqrt(), seen.float()))
        self._unit = step if self._unit is None else self._unit.to(call.device) * fade + step

    @abc.abstractmethod
    def _recall(self, call: LayerCall) -> Tensor | None:
        """Return the relative squares, shape (N,), or None."""

    @abc.abstractmethod
    def _learn(self, call: LayerCall, squares: Tensor, weights: Tensor, fade: Tensor) -> None:
        """Learn the relative squares of a step; ``weights`` is 1 for valid tokens, ``fade`` the decay."""

    def tensors(self) -> dict[str, Tensor]:
        """Return "unit", to which subclasses add their own tensors; empty if nothing was learned."""
        return {} if self._unit is None else {"unit": self._unit}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore "unit"; raise ValueError if it is missing or malformed."""
        unit = tensors.get("unit")
        if tensors and (unit is None or unit.dtype != torch.float32 or unit.shape != (2,) or not _are_sums(unit)):
            raise ValueError("unit must be two finite float32 numbers of at least 0.")
        self._unit = None if unit is None else unit.clone()


def check_tensors(estimator: NormEstimator, tensors: dict[str, Tensor], optional: tuple[str, ...]) -> None:
    """Reject tensors that an estimator cannot have saved: unknown names, other dtypes, negative or non-finite values.

    ``optional`` are the allowed names in addition to "unit", all float32.
    """
    kind = type(estimator).__name__
    if unknown := sorted(set(tensors) - {"unit", *optional}):
        raise ValueError(f"{kind} has the tensors unit, {', '.join(optional)}; got {', '.join(unknown)}.")
    for name in set(tensors) & set(optional):
        if tensors[name].dtype != torch.float32 or not _are_sums(tensors[name]):
            raise ValueError(f"{name} of {kind} must hold finite float32 numbers of at least 0.")


def _are_sums(tensor: Tensor) -> bool:
    return bool((tensor.isfinite() & (tensor >= 0)).all())

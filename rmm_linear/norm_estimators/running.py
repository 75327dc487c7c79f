"""Running means of ‖yᵢ‖² by the position of a token in its sequence, by its id, or by both.

They are updated online: no dataset index, no second epoch, no memory that grows with the data set. With both keys ŷ² is
a product: the mean by position times the mean by id of the residual, ‖yᵢ‖² divided by the mean by position. A mean for
every pair of position and id would see each pair too rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rmm_linear._support.validation import check_integer
from rmm_linear.norm_estimators.base import LayerCall, RelativeEstimator, check_tensors

POSITION, TOKEN = "position", "token"


class RunningNorms(RelativeEstimator):
    """Running means of the relative ‖yᵢ‖² for every value of one key or of several.

    The mean of a value is smoothed, (Σ squares + 1)/(count + 1): the mean over all tokens, which is 1, counts as one
    more observation. A value that was never seen gets the mean over all tokens.

    "position" is counted from the first valid token. It needs inputs of the shape (batch, sequence, I), or an
    ``attention_mask`` or ``input_ids`` from which the sequences follow. "token" needs a model whose forward takes
    ``input_ids``; ids that are equal modulo ``buckets`` share a mean, which bounds the memory for any vocabulary.
    Vocabularies are usually ordered by frequency, so ids that share a mean with a frequent one are rare.

    Memory of a layer, on its device: 8 bytes per position and 8 per bucket, 256 KiB by default. Time: a few passes over
    N numbers and one over the means, in each direction.

    Args:
        by: The keys, "position" or "token"; each key is fitted to the residual of the keys before it.
        decay: Factor on the weight of earlier steps at every step, in (0, 1]; 1 weights all tokens equally.
        buckets: Number of means by id.

    Raises:
        TypeError: If ``buckets`` is no integer.
        ValueError: If a key is unknown or comes twice, or a number is out of range.

    Example:
        >>> import torch
        >>> call = LayerCall((2, 3), torch.device("cpu"))
        >>> estimator = RunningNorms(["position"], decay=1.0)
        >>> estimator.observe(call, torch.tensor([3.0, 1.0, 0.0, 3.0, 1.0, 0.0]))
        >>> estimator.predict(call)[:3]
        tensor([2.6667, 1.3333, 1.0541])
    """

    def __init__(self, by: Sequence[str], decay: float = 0.9, buckets: int = 32_768) -> None:
        """Start without any observation."""
        super().__init__(decay)
        check_integer("buckets", buckets)
        if isinstance(by, str) or not by or len(set(by)) < len(by) or not set(by) <= {POSITION, TOKEN}:
            raise ValueError(f'by must list "{POSITION}", "{TOKEN}" or both, got {by!r}.')
        self.by, self.buckets = tuple(by), buckets
        self._sums: dict[str, Tensor] = {}  # key: float32 of shape (2, values): squares, and tokens

    def _recall(self, call: LayerCall) -> Tensor | None:
        result = None
        for key in self.by:
            values = self._values(key, call)
            if values is not None and key in self._sums:
                mean = self._mean(key, values, call)
                result = mean if result is None else result * mean
        return result

    def _learn(self, call: LayerCall, squares: Tensor, weights: Tensor, fade: Tensor) -> None:
        for key in self.by:
            values = self._values(key, call)
            if values is None:
                continue
            self._fit(key, call).mul_(fade).index_add_(1, values, torch.stack((squares * weights, weights)))
            squares = squares / self._mean(key, values, call)

    def _mean(self, key: str, values: Tensor, call: LayerCall) -> Tensor:
        squares, tokens = self._fit(key, call)[:, values] + 1
        return squares / tokens

    def _values(self, key: str, call: LayerCall) -> Tensor | None:
        if key == POSITION:
            return call.places()
        return None if call.input_ids is None else call.input_ids.long().remainder(self.buckets)

    def _fit(self, key: str, call: LayerCall) -> Tensor:
        """Return the sums, on the call's device, with room for its values."""
        old = self._sums.get(key, torch.zeros(2, 0, dtype=torch.float32)).to(call.device)
        size = self.buckets if key == TOKEN else call.tokens // call.shape[0]
        new = torch.nn.functional.pad(old, (0, size - old.shape[1])) if size > old.shape[1] else old
        self._sums[key] = new
        return new

    def tensors(self) -> dict[str, Tensor]:
        """Return "unit", and the sums of each key under its name; empty if nothing was learned."""
        return {**super().tensors(), **self._sums}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that :meth:`tensors` returned; raise ValueError if malformed or of other ``buckets``."""
        check_tensors(self, tensors, optional=self.by)
        sums = {key: tensors[key].clone() for key in self.by if key in tensors}
        for key, values in sums.items():
            if values.dim() != 2 or len(values) != 2 or (key == TOKEN and values.shape[1] != self.buckets):
                wanted = f"(2, {self.buckets if key == TOKEN else 'positions'})"
                raise ValueError(f"{key} must have the shape {wanted}, got {tuple(values.shape)}.")
        super().load_tensors(tensors)
        self._sums = sums

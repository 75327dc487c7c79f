"""The published estimator: the gradient norms of each example's tokens from when it was last seen, one epoch ago.

Source: Liu et al. 2023, arXiv 2305.15265, section 3.3 and algorithm 1.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from rmm_linear._support.validation import check_integer
from rmm_linear.norm_estimators.base import LayerCall, RelativeEstimator


class SampleCache(RelativeEstimator):
    """Caches gradient norms in host memory by the index of the example in the data set.

    Predictions for an example start in its second epoch. In a batch where only some examples are cached, the others get
    the mean of these. The batch must contain the indices, see :func:`rmm_linear.estimators.with_sample_index`.

    Memory: 2 bytes (bfloat16) per token of the longest sequence, or per sequence, for each index up to the largest one
    seen; examples beyond ``max_bytes`` are not cached, with a warning. Time: the backward pass synchronizes with the
    device once per layer. Under distributed training every rank caches the examples that it has seen itself.

    Args:
        per_token: Cache every token; False caches one root mean square per sequence.
        max_bytes: Upper limit of host memory for one layer.
    """

    def __init__(self, per_token: bool = True, max_bytes: int = 2**27) -> None:
        """Start with an empty cache."""
        super().__init__(decay=0.9)
        if not isinstance(per_token, bool):
            raise TypeError(f"per_token must be True or False, got {per_token!r}.")
        check_integer("max_bytes", max_bytes)
        self.per_token, self.max_bytes = per_token, max_bytes
        self._squares: Tensor | None = None  # (examples, width); NaN where nothing is cached
        self._warned = False

    def _recall(self, call: LayerCall) -> Tensor | None:
        index = self._index(call)
        if index is None or self._squares is None or not len(self._squares):
            return None
        outside = (index < 0) | (index >= len(self._squares))
        found = self._squares[index.masked_fill(outside, 0)].masked_fill(outside.unsqueeze(1), torch.nan)
        if bool(found.isnan().all()):
            return None
        found = found.to(call.device, torch.float32).gather(1, self._columns(call).clamp_max(found.shape[1] - 1))
        known = ~found.isnan()
        counted = known & call.valid.view(len(index), -1) if self.per_token else known
        mean = torch.where(counted, found, 0).sum() / counted.sum().clamp_min(1)
        return torch.where(known, found, mean).expand(len(index), call.tokens // len(index)).reshape(-1)

    def _learn(self, call: LayerCall, squares: Tensor, weights: Tensor, fade: Tensor) -> None:
        index = self._index(call)
        if index is None:
            return
        batch = len(index)
        squares, weights = squares.view(batch, -1), weights.view(batch, -1)
        if self.per_token:
            values = squares.new_full((batch, squares.shape[1] + 1), torch.nan)
            # Masked tokens have no position: they go to an extra column, which is dropped.
            columns = torch.where(weights > 0, self._columns(call), squares.shape[1])
            values = values.scatter_(1, columns, squares)[:, :-1]
        else:
            values = (squares * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        values = values.to("cpu", torch.bfloat16)
        fits = index >= 0
        if not bool(fits.any()) or bool(values.isnan().all()):
            return
        cache = self._grow(int(index.max()) + 1, values.shape[1])
        fits &= index < len(cache)
        cache[index[fits]] = torch.nan  # the sequence may have been longer before
        cache[index[fits], : values.shape[1]] = values[fits, : cache.shape[1]]

    def _index(self, call: LayerCall) -> Tensor | None:
        return call.sample_index if len(call.shape) > 1 else None

    def _columns(self, call: LayerCall) -> Tensor:
        places = call.places() if self.per_token else None
        if places is None:
            return torch.zeros(call.shape[0], 1, dtype=torch.int64, device=call.device)
        return places.view(call.shape[0], -1)

    def _grow(self, rows: int, width: int) -> Tensor:
        old = torch.empty(0, 0, dtype=torch.bfloat16, device="cpu") if self._squares is None else self._squares
        width = max(width, old.shape[1])
        most = self.max_bytes // (old.element_size() * width)
        if rows > most and not self._warned:
            self._warned = True  # Python's own filter would not: the index in the message grows with every batch
            warnings.warn(
                f"The sample cache has {self.max_bytes} bytes for each layer, and sees example {rows - 1}: those from "
                f"number {most} on are not remembered. Give max_bytes more, remember sequences (per_token=False), or "
                "use the norm estimator position_token.",
                RuntimeWarning,
                stacklevel=2,
            )
        rows = min(most, max(rows, len(old)))
        if rows != len(old) or width > old.shape[1]:
            new = torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device="cpu")
            new[: len(old), : old.shape[1]] = old[:rows]
            self._squares = old = new
        return old

    def tensors(self) -> dict[str, Tensor]:
        """Return "unit" and "cache"; empty if nothing was learned."""
        return {} if self._squares is None else {**super().tensors(), "cache": self._squares}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that :meth:`tensors` returned; raise ValueError if malformed or above ``max_bytes``."""
        cache = tensors.get("cache")
        if cache is None and tensors:
            raise ValueError(f"SampleCache needs the tensors unit and cache, got {', '.join(sorted(tensors))}.")
        if cache is not None:
            right = cache.dim() == 2 and cache.dtype == torch.bfloat16 and (self.per_token or cache.shape[1] == 1)
            if not right or bool((cache < 0).any() | cache.isinf().any()):
                raise ValueError(
                    f"cache must be bfloat16 of the shape (examples, {'tokens' if self.per_token else '1'}), finite "
                    f"and at least 0, got {cache.dtype} of the shape {tuple(cache.shape)}."
                )
            if cache.nbytes > self.max_bytes:
                raise ValueError(f"cache must have at most max_bytes={self.max_bytes} bytes, got {cache.nbytes}.")
        super().load_tensors(tensors)
        self._squares = None if cache is None else cache.clone()

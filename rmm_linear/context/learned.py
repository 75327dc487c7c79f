"""What modules learn from their first training steps: which rows have a gradient, and how far attention scores spread.

A classifier reads one token of every sequence, so in its last block all operations but keys and values have a gradient
in one row per sequence. What is saved of the other rows is multiplied by zeros. Two patterns are known: the first row
of every sequence, and the last one that is no padding. A module that shows one of them in three backward passes
saves these rows alone from then on, and every later backward pass is checked: a gradient elsewhere is an error, after
which all rows are saved.

Queries and keys pass through softmax, and the bias of codes of 4 bits grows with the size of the scores: bias² is 0.07
of the variance for scores with a standard deviation of 4, and more than the variance at 12. A module of which a head
has more than 4 takes 8 bits for queries and keys from then on. In a model that is trained from scratch, all scores are
alike in the first passes, so every 64th pass is looked at, too.

The host reads what was observed between steps, so that all passes of a step save alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear.sketches import TokenMask

STEPS = 3
_AGAIN = 64  # passes after which scores are looked at again
MOST_SPREAD = 4.0
_MASKED = -1e4
MOST_ERROR = 0.135  # of a score, by codes of 4 bits: bias² is then 0.001 to 0.01 of the variance


@dataclass
class Learned:
    """What a module has shown in its first steps."""

    steps: int = 0  # those that were read
    # Of those that the host has not read, four numbers each, float64
    unread: list[Tensor] = field(default_factory=list, compare=False)

    @property
    def is_decided(self) -> bool:
        return self.steps >= STEPS

    @property
    def is_observing(self) -> bool:
        return len(self.unread) + self.steps < STEPS

    def add(self, values: list[float]) -> None:
        """Add what one step has shown."""
        raise NotImplementedError

    def settled(self) -> Learned:
        """Return a copy that learns nothing more."""
        return replace(self, steps=STEPS, unread=[])

    def to_dict(self) -> dict[str, Any]:
        """Return what was read, as plain JSON types."""
        return {name: value for name, value in vars(self).items() if name not in ("unread", "calls", "is_watching")}

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore :meth:`to_dict`'s result."""
        if set(values) != set(self.to_dict()) or any(
            type(values[name]) is not type(value) for name, value in self.to_dict().items()
        ):
            raise ValueError(f"a module must have learned {self.to_dict()}, got {dict(values)}")
        vars(self).update(values, unread=[])


@dataclass
class GradientRows(Learned):
    """The rows of a module's output that have a gradient."""

    is_first: bool = True  # whether they were all the first rows of their sequences
    is_last: bool = True  # whether they were all the last valid ones
    shortest: int = 0  # the least length of a sequence
    longest: int = 0  # the greatest length: the last row of sequences of one length, without a mask, may be one of many
    is_masked: bool = True  # whether a mask said in all steps which rows are valid
    pattern: int = 0  # the decision: 1 saves the first row of every sequence alone, -1 the last one, 0 all

    def observe(self, y: Tensor, shape: tuple[int, ...], mask: TokenMask | None) -> None:
        """Look at the gradient of an output, shape (N, O), of sequences whose shape is (B, T)."""
        if len(shape) != 2 or len(y) != shape[0] * shape[1]:
            self.steps, self.pattern = STEPS, 0  # no sequences
        if not self.is_observing or isinstance(y, FakeTensor):  # a simulated step has no values
            return
        place, sizes = torch.arange(shape[1], device=y.device), largest_of_rows(y)
        rows = (sizes != 0).view(shape)
        others = rows & (place != last_rows(shape, mask, y.device).unsqueeze(1))
        is_usable = rows.any() & sizes.isfinite().all()  # no step that overflowed
        found = torch.stack([rows[:, 1:].any(), others.any(), is_usable])
        length = shape[1] if mask is not None else -shape[1]
        self.unread.append(torch.cat((place.new_tensor([length]), found)).double())

    def add(self, values: list[float]) -> None:
        """Add the length, whether other rows than the first, and than the last, had a gradient, and whether any had."""
        length, not_first, not_last, is_usable = map(int, values)
        if is_usable:
            self.shortest = min(abs(length), self.shortest or abs(length))
            self.longest = max(abs(length), self.longest)
            self.is_masked = self.is_masked and length > 0
            self.steps += 1
            self.is_first, self.is_last = self.is_first and not not_first, self.is_last and not not_last
        if self.steps >= STEPS and self.shortest > 1:
            is_last = self.is_last and (self.is_masked or self.shortest < self.longest)
            self.pattern = 1 if self.is_first else -int(is_last)

    def settled(self) -> GradientRows:
        """Return a copy that learns nothing more, and if it has not decided, leaves out nothing."""
        return replace(self, steps=STEPS, unread=[])

    def mask(self, shape: tuple[int, ...], mask: TokenMask | None, device: torch.device) -> TokenMask | None:
        """Return the rows that are saved of (B, T) rows; ``mask`` are those that are no padding."""
        if not self.pattern or len(shape) != 2 or shape[1] < 2:
            return mask
        place = torch.arange(shape[1], device=device)
        if self.pattern > 0:
            made = TokenMask.of((place == 0).expand(shape).reshape(-1))
        else:
            made = TokenMask.of((place == last_rows(shape, mask, device).unsqueeze(1)).reshape(-1))
        made.know_count(shape[0])
        return made


@dataclass
class ScoreSpread(Learned):
    """The standard deviation of the scores of a query, of the head that has the largest.

    Of a region, whose queries and keys are not known, it follows from the error of its scores.
    """

    largest: float = 0.0
    calls: int = field(default=0, compare=False)  # forward passes that could be looked at
    is_watching: bool = field(default=True, compare=False)  # whether passes after the first ones are looked at

    def settled(self) -> ScoreSpread:
        """Return a copy that learns nothing more."""
        return replace(self, steps=STEPS, unread=[], is_watching=False)

    def is_due(self) -> bool:
        """Count a forward pass, and say whether its scores are to be looked at."""
        self.calls += 1
        return self.is_observing or (self.is_watching and self.calls % _AGAIN == 0)

    @property
    def is_large(self) -> bool:
        """Whether queries and keys take 8 bits."""
        return self.is_decided and self.largest > MOST_SPREAD

    @property
    def is_too_large(self) -> bool:
        """Whether even 8 bits, whose steps are a 17th, would bias the gradient."""
        return self.is_decided and self.largest > 17 * MOST_SPREAD

    def observe(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Look at queries (B, h, Tq, d) and keys (B, hk, Tk, d).

        Over all queries and keys of a sequence, the mean of the squared score of a key less the mean of all keys is
        Σ (E[q qᵀ] ∘ Cov[k]): no score is made.
        """
        key = key - key.mean(2, keepdim=True)
        of_keys, of_queries = (one.float().transpose(-1, -2) @ one.float() / one.shape[2] for one in (key, query))
        squares = (of_queries * of_keys.repeat_interleave(query.shape[1] // key.shape[1], 1)).sum((-1, -2))
        found = (squares.mean(0).amax().clamp_min(0).sqrt() * abs(scale)).double()
        self.unread.append(torch.stack([found, *[torch.zeros_like(found)] * 3]))

    def observe_errors(self, scores: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Look at scores (…, Tq, Tk), and at those of decoded values: the largest error is MOST_ERROR, or too large."""
        found: list[Tensor] = []
        for exact, decoded in scores:
            is_seen = exact > _MASKED
            error = torch.where(is_seen, decoded.float() - exact.float(), 0)
            count = is_seen.sum(-1, keepdim=True).clamp_min(1)
            error = torch.where(is_seen, error - error.sum(-1, keepdim=True) / count, 0)
            variance = error.square().sum(-1) / count.squeeze(-1)
            variance = variance.mean(-1) if variance.dim() > 1 else variance.mean().view(1)  # of every head
            variance = variance.reshape(len(variance), -1).mean(0).amax()
            found.append(variance.sqrt().double() * (MOST_SPREAD / MOST_ERROR))
        if self.is_observing:  # nothing is seen of a kernel that is no function of PyTorch
            most = torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float64, device="cpu")
            self.unread.append(torch.stack([most, *[torch.zeros_like(most)] * 3]))

    def add(self, values: list[float]) -> None:
        """Add what one forward pass has shown, if nothing overflowed."""
        if values[0] == values[0]:
            self.steps, self.largest = self.steps + 1, max(self.largest, values[0])


def largest_of_rows(y: Tensor) -> Tensor:
    """Return the largest absolute value of every row of a matrix, not finite where one is not, without a copy of it."""
    if y.device.type != "cpu":
        return torch.linalg.vector_norm(y, math.inf, dim=1)
    return torch.maximum(y.amax(1), y.amin(1).neg())  # in a tenth of the time of the norm


def last_rows(shape: tuple[int, ...], mask: TokenMask | None, device: torch.device) -> Tensor:
    """Return the place of the last row of every sequence that is no padding, int64, shape (B,)."""
    if mask is None:
        return torch.full((shape[0],), shape[1] - 1, device=device)
    return (mask.valid.view(shape) * torch.arange(shape[1], device=device)).amax(1)


def read_all(learned: Iterable[Learned]) -> None:
    """Add what all have observed; the host waits once."""
    found = [(one, values) for one in learned for values in one.unread]
    for one, _ in found:
        one.unread = []
    if found:
        together = torch.stack([values.to(found[0][1].device) for _, values in found])
        for (one, _), values in zip(found, together.tolist(), strict=True):
            one.add(values)

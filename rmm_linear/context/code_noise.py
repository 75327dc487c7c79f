"""Find in the first steps which codes add more noise than their gradient bears: they take more bits from then on.

A code's noise is a known share of what a backward pass multiplies it by, but gradients may cancel where noise does not:

- The gradient of a linear layer's weight, dW = YᵀX, sums over tokens. With X in a code whose elements have the variance
  v, E‖dŴ − dW‖² = Σᵢ ‖yᵢ‖² Σⱼ vᵢⱼ. Where a batch's samples are alike and pull in opposite directions, ‖dW‖ is small.
- An activation's dX = dY ∘ g'(X) has errors of the variance step²/12 · dY², independent of each other. Summed over
  tokens or pixels, as in the gradients of biases, they add up to V = step²/12 · ‖dY‖². Where BatchNorm follows, all of
  dY adds up to zero, so that little of dX is left in that sum if g' is nearly the same everywhere.

Convolutions are looked at as linear layers are: they sum over positions. Gated MLPs have two codes, each as that of an
activation, as have products of two activations. Calls in a module's own code are looked at one by one, each as the
operation that it is; the code that needs most bits decides for all of the module.

Every module adds V, and the squared norm of the sum, of :data:`STEPS` training steps. Where √V is more than
:data:`MOST_NOISE` of the sum's norm without noise (0.73 in 2 bits), the code takes as few bits as bring it below. Noise
of one module hides that of those below it, which inherit it: after a decision, the next steps are looked at again, in
:data:`ROUNDS` rounds at most. Layers that share a code share the decision.

Where no backward pass of a round was looked at, nothing is any more. A decision needs a moment without forward passes
that wait for their backward pass; where there is none for long, the log and the report say so.

Not looked at: sketches of fewer rows, and linear layers with ``memory``, as wider codes would leave fewer of them; 1.6
bits and 1 bit; norms, attention, experts, elementwise code that is known by no name, einsum and products of matrices
other than tokens times a weight; compiled code. Of a module that is called several times in a step, squares of the
norms are added, as if the calls' gradients had nothing in common. Ranks decide by their own batches; codes never leave
a rank, and gradients are unbiased whatever they decide. Those of a tensor parallel group see the same numbers where
they must compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear.context.learned import STEPS
from rmm_linear.packing import RELATIVE_VARIANCE, WIDTHS
from rmm_linear.sketches.seeds import is_capturing, is_simulated

MOST_NOISE = 0.5
ROUNDS = 3
_ALL_NOISE = 1000.0  # by the gradient, where none shows


@dataclass
class CodeNoise:
    """What the codes of a model have shown in its first steps.

    Attributes:
        widened: Bits of the modules that take more of them, by index, and the noise by the gradient that they had.
        rounds: Those that are over; :data:`ROUNDS` if nothing is looked at any more.
    """

    widened: dict[int, tuple[int, float]] = field(default_factory=dict)
    rounds: int = 0
    _passes: int = field(default=0, compare=False)
    # V, and the squared norm, by the index of a module and the place of a code in it
    _sums: dict[tuple[int, int], Tensor] = field(default_factory=dict, compare=False)
    _bits: dict[tuple[int, int], int] = field(default_factory=dict, compare=False)  # of these codes

    @property
    def is_observing(self) -> bool:
        """Whether the forward pass that is running is looked at."""
        return self.rounds < ROUNDS and self._passes < STEPS

    @property
    def is_unseen(self) -> bool:
        """Whether the first forward pass of a round is yet to come."""
        return self.rounds < ROUNDS and not self._passes

    @property
    def is_full(self) -> bool:
        """Whether a decision can be made."""
        is_over = self.rounds < ROUNDS and self._passes >= STEPS
        return is_over and not any(is_capturing(one.device) for one in self._sums.values())

    def note_pass(self) -> None:
        """Note the end of a forward pass of training."""
        if self.is_observing and not is_simulated():
            self._passes += 1

    def add(self, index: int, variance: Tensor, square: Tensor, bits: float, place: int = 0, *, site: int = 0) -> None:
        """Add V and the squared norm of one code, from a backward pass.

        index: Of the module. bits: Of the code. place: Of the code in a call, ``site``: that of the call's first one.
        """
        if bits not in WIDTHS or isinstance(square, FakeTensor):
            return
        if square.device.type == "meta" or is_capturing(square.device):
            return
        found = torch.stack([variance.double(), square.double()])
        found = torch.where(found.isfinite().all(), found, 0)  # no step that overflowed
        key = index, site + place
        self._bits[key] = int(bits)
        known = self._sums.get(key)
        self._sums[key] = found if known is None else known.to(found.device) + found

    def decide(self, groups: Iterable[tuple[int, ...]], had_backward: bool = True) -> dict[int, tuple[int, float]]:
        """Return the bits that modules need whose noise is too large, with that noise by the gradient; end the round.

        Of a module with several codes, those of the one that needs most; codes that are as wide as can be need none.

        groups: Indices of the modules that share a code.
        had_backward: Whether there was a backward pass: if none of it was looked at, nothing is any more.
        """
        sums, bits, self._sums, self._bits, self._passes = self._sums, self._bits, {}, {}, 0
        self.rounds += 1
        if not sums:
            self.rounds = ROUNDS if had_backward else self.rounds
            return {}
        device = next(iter(sums.values())).device
        values = torch.stack([one.to(device) for one in sums.values()]).tolist()
        each = dict(zip(sums, values, strict=True))
        found = dict(each)
        for group in sorted(groups, key=len):
            members = [(index, 0) for index in group if (index, 0) in each]
            together = [sum(column) for column in zip(*(each[one] for one in members), strict=True)]
            found |= dict.fromkeys(members, together)
        useless = dict[int, tuple[int, float]]()
        for key, one in found.items():
            noise, width = _ratio(*one), bits[key]
            wider = width_below(noise, width)
            if noise > _most(width) and wider > width:
                useless[key[0]] = max((wider, noise), useless.get(key[0], (0, 0.0)))
        if not useless:
            self.rounds = ROUNDS
        return useless

    def note_widened(self, widened: Mapping[int, tuple[int, float]]) -> None:
        """Note the modules that have taken more bits; where none can, nothing more is looked at."""
        self.widened.update(widened)
        if not widened:
            self.rounds = ROUNDS

    def settled(self) -> CodeNoise:
        """Return a copy that looks at nothing more."""
        return replace(self, widened=dict(self.widened), rounds=ROUNDS, _passes=0, _sums={}, _bits={})


def _most(bits: int) -> float:
    """Return the bound of a code: 2 bits alone have nearly so much of themselves, where no gradients cancel."""
    return max(MOST_NOISE, 2 * math.sqrt(RELATIVE_VARIANCE[bits]))


def width_below(noise: float, bits: int) -> int:
    """Return 4 or 8, whichever brings the noise of a narrower code below the bound; its own width if it is 8."""
    is_enough = bits < 4 and noise * math.sqrt(RELATIVE_VARIANCE[4] / RELATIVE_VARIANCE[bits]) <= MOST_NOISE
    return 4 if is_enough else 8


def _ratio(variance: float, square: float) -> float:
    if not variance:
        return 0.0
    return min(math.sqrt(variance / (square - variance)), _ALL_NOISE) if square > variance else _ALL_NOISE

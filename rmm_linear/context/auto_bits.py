"""bits="auto": the width of the stored elements, chosen for each layer by its predicted noise.

With a fixed number of bytes, fewer bits allow more rows: less sketch noise, more rounding noise. Which term is larger
depends on the batch: where most tokens are padding, 4 bits hold every valid token and there is no sketch noise at all.

The prediction needs no gradient: random signs replace Y on the valid tokens. The sketch term is then the kind's exact
variance, the rounding term Σ_b ‖(SᵀY)_b‖² E‖ẑ_b − z_b‖², both in units of ‖Y‖². Each layer sums the prediction over its
first :data:`STEPS` inputs, stored in 4 bits meanwhile, and then uses the width with the least noise. A forward pass
that ran before the choice is recomputed with the width it used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rmm_linear._support.autocast import without_autocast
from rmm_linear.config import RMMConfig
from rmm_linear.context.surroundings import in_backward, next_node, running_node
from rmm_linear.ops.sketches import PACK, SKETCH
from rmm_linear.packing import WIDTHS, rounding_variance
from rmm_linear.sketches import TokenMask, probabilities, row_norms, variance
from rmm_linear.sketches.philox import signs
from rmm_linear.sketches.seeds import is_capturing

STEPS = 4
_COLUMNS = 8
_STREAM = 4


@dataclass
class AutoBits:
    """The predicted noise of every width for one layer, and the width chosen by it.

    Attributes:
        bits: The chosen width, or None while the layer still observes inputs.
        steps: Number of inputs observed.
        noise: Predicted noise of every width, summed over these inputs.
        since: Sequence number of the next autograd node when the width was chosen.
        backward_seen: Whether a backward pass ran since the last call; for layers outside of a converted model.
        unread: The predictions of inputs that the host has not read yet, float64, shape (widths,).
    """

    bits: int | None = None
    steps: int = 0
    noise: dict[int, float] = field(default_factory=dict)
    since: int = field(default=0, compare=False)
    backward_seen: bool = field(default=False, compare=False)
    unread: list[Tensor] = field(default_factory=list, compare=False)

    def width(self) -> int | None:
        """Return the width for this call, perhaps a recomputation: None if its forward pass ran before the choice."""
        node = running_node() if in_backward() else None
        return None if node is not None and node < self.since else self.bits

    def observe(self, x: Tensor, config: RMMConfig, itemsize: int, mask: TokenMask | None) -> None:
        """Add the predicted noise of one input, shape (N, I), for every width."""
        if self.steps + len(self.unread) >= STEPS or isinstance(x, FakeTensor):
            return  # enough are waiting for a backward pass; and a simulated step has no values
        self.unread.append(torch.stack([predicted_noise(x, config, itemsize, bits, mask) for bits in WIDTHS]))

    def read(self) -> None:
        """Add what was observed; an input with NaN or infinity predicts nothing."""
        read_all([self])

    def add(self, predicted: list[float]) -> None:
        """Add the prediction of one input, for every width."""
        if all(map(math.isfinite, predicted)):
            self.noise = {bits: self.noise.get(bits, 0.0) + one for bits, one in zip(WIDTHS, predicted, strict=True)}
            self.steps += 1

    def choose(self) -> None:
        """Choose once enough inputs were observed. Called between steps, so that all passes of a step use one width."""
        choose_all([self])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out ``since``: a copy has no graph yet, and other processes number their nodes independently."""
        self.read()
        return {**vars(self), "since": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Add fields that models lack which older versions have pickled."""
        vars(self).update({"unread": [], **state})

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON types."""
        self.read()
        return {"bits": self.bits, "steps": self.steps, "noise": {str(k): v for k, v in self.noise.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AutoBits:
        """Restore the state from :meth:`to_dict`'s result."""
        bits, steps = values["bits"], values["steps"]
        noise = {int(k): float(v) for k, v in values["noise"].items()}
        if not (bits is None or (type(bits) is int and bits in WIDTHS)) or type(steps) is not int or steps < 0:
            raise ValueError(f"bits must be None, 8, 4 or 2 and steps a count, got {bits!r} and {steps!r}")
        if set(noise) != (set(WIDTHS) if steps else set()):
            raise ValueError(f"noise must name the widths 8, 4 and 2 after {steps} steps, got {sorted(noise)}")
        return cls(bits, steps, noise)


def choose_all(choices: Iterable[AutoBits]) -> None:
    """Let all choose that have observed enough inputs."""
    due = [one for one in choices if one.bits is None and one.steps + len(one.unread) >= STEPS]
    if any(is_capturing(each.device) for one in due for each in one.unread[:1]):
        return  # nothing can be read while a graph is captured
    read_all(due)
    for one in due:
        if one.steps >= STEPS:
            one.bits = min(one.noise, key=lambda bits, noise=one.noise: (math.isnan(noise[bits]), noise[bits]))
            one.since = next_node()


def read_all(choices: Iterable[AutoBits]) -> None:
    """Add what all have observed; the host waits once."""
    found = [(one, predicted) for one in choices for predicted in one.unread]
    for one, _ in found:
        one.unread = []
    if found:
        together = torch.stack([each.to(found[0][1].device) for _, each in found])
        for (one, _), values in zip(found, together.tolist(), strict=True):
            one.add(values)


@without_autocast
def predicted_noise(x: Tensor, config: RMMConfig, itemsize: int, bits: int, mask: TokenMask | None) -> Tensor:
    """Predict E‖dŴ − dW‖² / ‖Y‖²_F for a width, with random signs in place of Y: a float64 scalar.

    x: Layer input, shape (N, I). itemsize: Bytes per element that is not packed.
    """
    spec = config.spec(x.shape[0], x.shape[1], itemsize, bits)
    if spec is None:
        return x.new_zeros((), dtype=torch.float64)
    seed = torch.zeros(1, dtype=torch.int64, device=x.device)
    y = signs(seed, x.shape[0] * _COLUMNS, _STREAM).view(-1, _COLUMNS).to(torch.float32)
    if mask is not None:
        y = y * mask.valid.unsqueeze(1)
    p = probabilities(row_norms(x), spec.uniform_mix, mask=mask) if spec.samples_rows(x.shape[0]) else None
    shape = {"kind": spec.kind, "rows": spec.rows, "block": spec.block, "mask": mask, "p": p}
    z, sketched_y = SKETCH(x, seed=seed, **shape), SKETCH(y, seed=seed, **shape)
    rounding = sketched_y.double().square().sum(1) @ rounding_variance(PACK(z, bits, seed)[1], z.shape[1])
    return (variance(x, y, **shape) + rounding) / y.square().sum().clamp_min(1)

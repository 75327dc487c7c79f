"""ProbeCall: one probed call of one layer, from its forward pass to the variances computed from its X and Y.

Both X and Y are needed at the same time, in the backward pass. Usually X is held by the hook on the layer's output
until Y arrives there, and so no longer than the graph of the step lives. Activation checkpointing is used in order not
to hold X. There the probe holds only a few elements of X, by which it recognises the recomputed X among those of other
calls: of the same layer in this step, and of forward passes that are not probed. With reentrant checkpointing Y arrives
at the recomputed output, with the non-reentrant kind at the output of the forward pass, either before X or after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rmm_linear._support.autocast import autocast_dtype
from rmm_linear.config import RMMConfig
from rmm_linear.context.surroundings import in_checkpoint
from rmm_linear.layers.function import spec_for
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.norm_estimators import LayerCall
from rmm_linear.sketches import Moments, TokenMask, probabilities, row_norms
from rmm_linear.spec import COORDINATE_BITS, SaveSpec
from rmm_linear.variance.closed_forms import between_samples, rows_by_length, sketch_variance
from rmm_linear.variance.probe.results import SEQUENCES, TOKENS, ProbeRow

_SAMPLE = 64


@dataclass(eq=False)
class ProbeCall:
    """A probed call of a layer."""

    step: int
    module: str
    kind: str  # family of the layer's sketch
    spec: SaveSpec | None  # how the layer saves X; None if it saves X itself
    mask_padding: bool  # whether the sketch leaves padding out
    bits: float
    shape: torch.Size
    mask: Tensor | None  # token mask, shape (batch, sequence), or None
    # Ŷ, the norm estimator's prediction of ‖yᵢ‖ in this call, shape (N,); None without an estimator
    expected: Tensor | None = None
    basis: Tensor | None = None  # the fixed directions of X in this call, shape (I, k); None without any
    missed: bool = False  # whether the layer was recomputed with another X of this shape
    sample: Tensor | None = None  # a few elements of X, if X itself is only available in the recomputation
    handle: RemovableHandle | None = None  # the hook on the output; None while there is no output to hook
    x: Tensor | None = None  # X, until Y is available
    y: Tensor | None = None  # Y, until X is available
    version: int | None = None  # X's version counter when it was stored

    @classmethod
    def of(
        cls,
        step: int,
        name: str,
        module: nn.Module,
        x: Tensor,
        mask: Tensor | None,
        config: RMMConfig,
        *,
        is_exact: bool = False,
    ) -> ProbeCall:
        """Record a call that has just been made, with input (*, I)."""
        weight: Any = module.weight if isinstance(module, nn.Linear) else module.weight.t()  # pyright: ignore
        itemsize = (autocast_dtype(x.device.type, x.dtype) or x.dtype).itemsize
        valid = None if mask is None or not config.mask_padding else int(mask.count_nonzero())
        spec = None if is_exact or _stays_exact(module) else spec_for(x.shape, itemsize, weight, config, valid)
        width = None if spec is None else spec.bits
        expected = _expected(module, x) if spec is not None and spec.samples_rows(x.shape[:-1].numel()) else None
        width = width or 8 * itemsize
        basis = None if spec is None else _basis(module, spec, x, valid)
        return cls(step, name, config.kind, spec, config.mask_padding, width, x.shape, mask, expected, basis)

    def see(self, x: Tensor) -> None:
        """Hold X until Y is available."""
        self.x, self.version = x.detach(), _version(x)

    def is_overwritten(self) -> bool:
        """Say whether X has been modified in place since it was stored."""
        return self.x is not None and _version(self.x) != self.version

    def close(self) -> None:
        self.x = self.y = self.sample = self.mask = self.expected = self.basis = None
        if self.handle is not None:
            self.handle.remove()

    def relative_distance(self, x: Tensor) -> float:
        """Return the largest difference of sampled elements from this call's, relative to their largest magnitude."""
        if self.sample is None or x.shape != self.shape:
            return math.inf
        new, old = sample(x).double(), self.sample.double()
        scale = float(old.abs().amax()) if len(old) else 0.0
        return float((new - old).abs().amax()) / scale if scale > 0 else (0.0 if torch.equal(new, old) else math.inf)

    def measure(self, x: Tensor, y: Tensor) -> ProbeRow:
        """Compute the row from X (*, I) and Y (*, O); its numbers are NaN where one is not finite."""
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            found = noises(x, y, self.spec, self.samples, self.mask, self.mask_padding, self.expected, self.basis)
        tokens = x.shape[0]
        rows = tokens if self.spec is None else self.spec.kept_rows(tokens)
        samples = TOKENS if self.samples is None else SEQUENCES
        sketched, sgd, sgd_tokens = found.sketch, found.sgd, found.sgd_tokens
        ratio = sketched / sgd if sgd > 0 else (math.inf if sketched > 0 else math.nan)
        layer = (self.step, self.module, self.kind, rows, self.bits)
        return ProbeRow(*layer, tokens, samples, found.alpha, sgd, sgd_tokens, sketched, ratio)

    @property
    def samples(self) -> tuple[int, int] | None:
        """(batch, sequence) of X; None if it is not known or the batch has only one sequence."""
        shape = self.shape[:-1]
        if len(shape) < 2 and self.mask is not None:
            shape = self.mask.shape
        return (shape[0], shape[1:].numel()) if len(shape) > 1 and shape[0] > 1 else None


def _stays_exact(module: nn.Module) -> bool:
    """Say whether a layer saves its input: where a code frees nothing, and where checkpointing runs the call again."""
    if not isinstance(module, SketchedLayer):
        return False
    if module.rmm_context is not None and module.rmm_index in module.rmm_context.kept_anyway:
        return True
    return module.rmm_config.checkpointed == "exact" and (not torch.is_grad_enabled() or in_checkpoint())


def _expected(module: nn.Module, x: Tensor) -> Tensor | None:
    """Return the ŷ that the layer used in the call that has just been made."""
    if not isinstance(module, SketchedLayer):
        return None
    shape, context = tuple(x.shape[:-1]), module.rmm_context
    if context is None:
        return None if module.rmm_estimator is None else module.rmm_estimator.predict(LayerCall(shape, x.device))
    return context.expected(module.rmm_index, context.known_call(shape, x.device, module.rmm_config.mask_padding))


def _basis(module: nn.Module, spec: SaveSpec, x: Tensor, valid: int | None) -> Tensor | None:
    """Return the fixed directions that were taken out of the rows, of the layer that saved them."""
    if not isinstance(module, SketchedLayer) or module.rmm_context is None or module.rmm_config.memory is not None:
        return None
    rows = x.shape[:-1].numel() if valid is None else valid
    if spec.bits is None or spec.kind != "countsketch" or spec.rows < rows:
        return None
    context, index = module.rmm_context, module.rmm_index
    sharing = next((group for group in context.sketch_cache.groups if index in group), (index,))
    found = [context.directions[one].basis for one in sharing if one in context.directions]
    return next((one for one in found if one is not None and one.shape[0] == x.shape[-1]), None)


@dataclass(frozen=True)
class Noises:
    """α and the variances of one layer and batch, see :class:`~rmm_linear.variance.ProbeRow`; NaN if undefined."""

    alpha: float
    sgd: float
    sgd_tokens: float
    sketch: float


def noises(
    x: Tensor,
    y: Tensor,
    spec: SaveSpec | None,
    samples: tuple[int, int] | None,
    mask: Tensor | None,
    mask_padding: bool = True,
    expected: Tensor | None = None,
    basis: Tensor | None = None,
) -> Noises:
    """Compute α, D²_SGD and D²_sketch of one layer and batch.

    x: Layer input, shape (N, I). y: Gradient with respect to the layer's output, shape (N, O). spec: How the layer
    saves X; None if it saves X itself, without noise. samples: (batch, sequence), or None for a variance over tokens.
    mask: Token mask of N elements; ignored if masked tokens have a gradient, as layers ignore such a mask too.
    expected: ŷ, the prediction of ‖yᵢ‖, shape (N,), for kinds that sample rows by it. basis: Fixed directions
    that are orthonormal, shape (I, k). The numbers are NaN if X or Y is not finite, or there are fewer than two
    samples.
    """
    moments = Moments.of(x, y)
    alpha = float(moments.g / moments.p)
    if math.isnan(alpha):
        # All zeros, as above LoRA's B at its initial value, have no noise; for values not finite it is undefined.
        is_zero = x.shape[0] > 1 and float(moments.p) == 0
        return Noises(math.nan, *[0.0 if is_zero else math.nan] * 3)
    valid = None if mask is None else mask.reshape(-1).bool()
    if valid is not None and bool(y[valid.logical_not()].any()):
        valid = None
    tokens = _between_tokens(moments, x.shape[0] if valid is None else int(valid.sum()))
    sgd = tokens if samples is None else float(between_samples(x, y, rows_by_length(samples, x.shape[0]), moments.g))
    if spec is None:
        return Noises(alpha, sgd, tokens, 0.0)
    valid, p = valid if mask_padding else None, None
    if spec.samples_rows(x.shape[0]):
        ranks = None if valid is None else TokenMask.of(valid)
        p = probabilities(row_norms(x), spec.uniform_mix, expected, ranks)
    shape: dict[str, Any] = {"kind": spec.kind, "rows": spec.rows, "bits": spec.bits, "block": spec.block}
    if basis is not None:  # X = C Bᵀ + R: codes of R and of C have errors of their own
        coordinates = x.float() @ basis
        x = x.float() - coordinates @ basis.T
    sketched = sketch_variance(x, y, **shape, mask=valid, probabilities=p, draws=1)
    if basis is not None:
        sketched += sketch_variance(coordinates, y, **{**shape, "bits": COORDINATE_BITS}, mask=valid, draws=1)
    return Noises(alpha, sgd, tokens, float(sketched))


def _between_tokens(moments: Moments, count: int) -> float:
    """Return D²_SGD over ``count`` tokens; the remaining tokens must have a gradient of 0."""
    if count < 2:
        return math.nan
    return max(0.0, float(count * moments.d - moments.g)) / (count - 1)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def sample(x: Tensor) -> Tensor:
    """Copy about 64 elements from the whole of an input, or all if there are fewer."""
    stride = max(1, x.numel() // _SAMPLE) | 1  # odd: an even stride might hit the same column in every row
    return x.detach().reshape(-1)[::stride].clone()


def is_trained(module: nn.Module) -> bool:
    """Say whether a call of a layer leads to a gradient of its weight: not if frozen, or sketched in eval mode."""
    weight: Any = module.weight
    return weight.requires_grad and (module.training or not isinstance(module, SketchedLayer))

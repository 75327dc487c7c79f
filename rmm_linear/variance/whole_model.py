"""Noise of a whole model's gradient: of all parameters, by operation and by depth, against that of the minibatch.

Stand-ins below a random one inherit its noise, since its error goes on into their output gradients. No closed form of
one operation shows that, so it is measured: the gradient of one batch is computed exactly and then several times with
new random numbers, with all operations converted and with each one alone. Dropout draws the same masks every time.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.tables import table
from rmm_linear._support.validation import check_integer
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert, revert
from rmm_linear.layers.converted import ConvertedModule

ALL = "all"


@dataclass(frozen=True)
class GradientNoise:
    """The result of :func:`gradient_noise`.

    Attributes:
        sgd: Name of every trained parameter to D²_SGD of its gradient, over sequences.
        stand_ins: Operation, or "all" for all of them together, to the same for D² of the stand-ins.
        sizes: Name to number of elements.
    """

    sgd: dict[str, float]
    stand_ins: dict[str, dict[str, float]]
    sizes: dict[str, int]

    def whole(self, operation: str = ALL) -> float:
        """Return the noise of the whole gradient.

        Args:
            operation: Of which operation.

        Returns:
            Σ D² / Σ D²_SGD over all trained parameters.
        """
        return _ratio(sum(self.stand_ins[operation].values()), sum(self.sgd.values()))

    def median_of_weights(self, operation: str = ALL) -> float:
        """Return the median over the weights of at least two dimensions, embeddings of positions and types excluded.

        Args:
            operation: Of which operation.

        Returns:
            The median of D² / D²_SGD; NaN without weights.
        """
        found = [
            _ratio(noise, self.sgd[name])
            for name, noise in self.stand_ins[operation].items()
            if name.endswith("weight") and self.sizes[name] > 1 and "norm" not in name.lower() and "embed" not in name
        ]
        return statistics.median(found) if found else float("nan")

    def by_depth(self, operation: str = ALL) -> dict[str, float]:
        """Return the noise of every block.

        Args:
            operation: Of which operation.

        Returns:
            Block, as the part of the parameters' names up to their first number, to Σ D² / Σ D²_SGD over its
            parameters, in the model's order.
        """
        noise: dict[str, float] = {}
        sgd: dict[str, float] = {}
        for name, value in self.stand_ins[operation].items():
            block = _block(name)
            noise[block] = noise.get(block, 0.0) + value
            sgd[block] = sgd.get(block, 0.0) + self.sgd[name]
        return {block: _ratio(value, sgd[block]) for block, value in noise.items()}

    def __str__(self) -> str:
        """Return a table with a row per block, the whole gradient and the median of the weights."""
        operations = list(self.stand_ins)
        columns = {operation: self.by_depth(operation) for operation in operations}
        rows = [(block, *(f"{columns[one][block]:.4f}" for one in operations)) for block in columns[ALL]]
        rows += [("whole gradient", *(f"{self.whole(one):.4f}" for one in operations))]
        rows += [("median of weights", *(f"{self.median_of_weights(one):.4f}" for one in operations))]
        return table(("noise by SGD's", *operations), rows)


def gradient_noise(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: RMMConfig | None = None,
    *,
    draws: int = 4,
    by_operation: bool = True,
) -> GradientNoise:
    """Measure the noise that a conversion would add to the gradient of every parameter.

    The model is converted and reverted in place; its parameters, gradients and training mode are left as they were, and
    so are the random number generators. Cost: one pass over each sequence, one over the batch, and ``draws`` over the
    batch for all operations together and for each one.

    Args:
        model: A model that is not converted and returns an object with a ``loss``.
        batch: Its keyword arguments, tensors of n sequences; padding is at the right or left.
        config: As for :func:`rmm_linear.convert`.
        draws: How often the gradient is computed with new random numbers.
        by_operation: Whether each operation is measured by itself too.

    Returns:
        D² and D²_SGD of every parameter. Print it.

    Raises:
        ValueError: If the model is converted, or the batch has fewer than two sequences.
    """
    config = config or RMMConfig()
    check_integer("draws", draws)
    if any(isinstance(module, ConvertedModule) for module in model.modules()):
        raise ValueError("gradient_noise takes a model that is not converted. Call rmm_linear.revert(model) first.")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    devices = sorted({p.device.index for p in trained.values() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), _training(model):
        state = torch.get_rng_state()
        sgd = _sgd_variance(model, batch, trained)
        exact = _gradients(model, batch, trained, state)
        found: dict[str, dict[str, float]] = {}
        for operations in [config.operations, *([one] for one in config.operations if by_operation)]:
            squares = _squares(model, batch, trained, exact, config.replace(operations=operations), draws, state)
            found[ALL if operations is config.operations else operations[0]] = squares
    return GradientNoise(sgd, found, {name: parameter.numel() for name, parameter in trained.items()})


def _squares(
    model: nn.Module,
    batch: Mapping[str, Any],
    trained: Mapping[str, nn.Parameter],
    exact: Sequence[Tensor],
    config: RMMConfig,
    draws: int,
    state: Tensor,
) -> dict[str, float]:
    """Mean of ‖ĝ − g‖² over the draws, for every parameter."""
    squares = dict.fromkeys(trained, 0.0)
    try:
        report = convert(model, config)
    except ValueError:  # the model has no module of this operation
        return squares
    try:
        for draw in range(1, draws + 1):
            if report.context is not None:
                report.context.salt = draw
            for name, found, right in zip(trained, _gradients(model, batch, trained, state), exact, strict=True):
                squares[name] += float((found.double() - right.double()).square().sum()) / draws
    finally:
        revert(model)
    return squares


def _gradients(
    model: nn.Module, batch: Mapping[str, Any], trained: Mapping[str, nn.Parameter], state: Tensor | None = None
) -> list[Tensor]:
    if state is not None:
        torch.set_rng_state(state)
    loss = model(**batch).loss
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g.detach() for g, p in zip(found, trained.values(), strict=True)]


def _sgd_variance(model: nn.Module, batch: Mapping[str, Any], trained: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """D²_SGD = n / (n − 1) · Σ ‖G_s − G/n‖², with G_s the part of sequence s in the batch's gradient G."""
    sequences = list(_sequences(batch))
    if len(sequences) < 2:
        raise ValueError(f"gradient_noise needs a batch of at least 2 sequences, got {len(sequences)}.")
    total = sum(weight for _, weight in sequences)
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained.values()]
    squares = [0.0] * len(sums)
    for inputs, weight in sequences:
        for place, gradient in enumerate(_gradients(model, inputs, trained)):
            part = gradient.double() * (weight / total)
            sums[place] += part
            squares[place] += float(part.square().sum())
    n = len(sequences)
    spread = (square - float(g.square().sum()) / n for square, g in zip(squares, sums, strict=True))
    return {name: n / (n - 1) * max(value, 0.0) for name, value in zip(trained, spread, strict=True)}


def _sequences(batch: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """The batch's sequences, without the columns that are padding, and the weight of each one's loss in the mean."""
    sizes = [len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    count = max(sizes, default=0)
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    for place in range(count):
        one = {
            key: value[place : place + 1]
            if isinstance(value, Tensor) and value.dim() and len(value) == count
            else value
            for key, value in batch.items()
        }
        if isinstance(mask, Tensor) and mask.dim() == 2:
            kept = mask[place].bool()
            one = {
                key: value[:, kept] if isinstance(value, Tensor) and value.shape[:2] == (1, len(kept)) else value
                for key, value in one.items()
            }
        is_tokenwise = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
        yield one, float((one["labels"] != -100).sum()) if is_tokenwise else 1.0


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _block(name: str) -> str:
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else name.split(".")[0] if "." not in name else ".".join(name.split(".")[:2])


def _ratio(noise: float, sgd: float) -> float:
    return noise / sgd if sgd else (0.0 if not noise else float("inf"))

"""Measure the variance that a conversion adds to a whole model's gradient, by operation and by depth.

Operations below a random one inherit its noise, since its error goes on into their output gradients. No closed form of
one operation shows that, so it is measured: the gradient of one batch is computed exactly and then several times with
new random numbers, with all operations converted and with each one alone. Dropout draws the same masks every time. The
model is converted once; where operations are to be exact, their modules have their original class for a while.
"""

from __future__ import annotations

import logging
import re
import statistics
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rmm_linear._support.progress import counting, expect, reporting
from rmm_linear._support.reports import Report
from rmm_linear._support.tables import keyed, named_table, wrapped
from rmm_linear._support.validation import check_integer
from rmm_linear.config import OPERATIONS, RMMConfig
from rmm_linear.context.learned import STEPS
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.exact import converted_modules, exact_but, set_aside, unconvert
from rmm_linear.memory.inputs import restored, sequences_in
from rmm_linear.variance.passes import Passes, measuring

logger = logging.getLogger(__name__)

ALL = "all"
_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models of which it is said how BatchNorm is measured
_OVERHEAD, _CONVERTED = 0.5, 1.5  # of a step: what a pass over one of its sequences adds; a pass of small models
_NO_ERRORS = "One draw has no standard error, and ratios of a draw differ by tens of per cent: draws=4 gives one."
_NOISELESS = ("dropout", "logits", "pooling")  # no noise at all, or that of another order of summation


@dataclass(frozen=True, repr=False)
class GradientNoise(Report):
    """The result of :func:`gradient_noise`.

    Attributes:
        sgd: Name of every trained parameter to D²_SGD of its gradient, over sequences.
        stand_ins: Operation, or "all" for all of them together, to the same for the D² that compression adds.
        weights: Names of the weights, of two and more dimensions, embeddings excluded.
        draws: Operation to what every draw added, of which ``stand_ins`` has the means.
    """

    sgd: dict[str, float]
    stand_ins: dict[str, dict[str, float]]
    weights: tuple[str, ...]
    draws: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)

    def whole(self, operation: str = ALL) -> float:
        """Return the variance ratio of the whole gradient.

        Args:
            operation: Of which operation.

        Returns:
            Σ D² / Σ D²_SGD over all trained parameters.
        """
        return self._whole(self.stand_ins[operation])

    def median_of_weights(self, operation: str = ALL) -> float:
        """Return the median variance ratio over the weights.

        Args:
            operation: Of which operation.

        Returns:
            The median of D² / D²_SGD; NaN without weights.
        """
        return self._median(self.stand_ins[operation])

    def errors(self, operation: str = ALL) -> tuple[float, float]:
        """Return the standard errors of :meth:`median_of_weights` and :meth:`whole`, over draws.

        Args:
            operation: Of which operation.

        Returns:
            Both; NaN for a single draw.
        """
        draws = self.draws.get(operation, ())
        if len(draws) < 2:
            return float("nan"), float("nan")
        medians, wholes = [self._median(draw) for draw in draws], [self._whole(draw) for draw in draws]
        return statistics.stdev(medians) / len(draws) ** 0.5, statistics.stdev(wholes) / len(draws) ** 0.5

    def _whole(self, noise: Mapping[str, float]) -> float:
        return _ratio(sum(noise.values()), sum(self.sgd.values()))

    def _median(self, noise: Mapping[str, float]) -> float:
        found = [_ratio(noise[name], self.sgd[name]) for name in self.weights]
        return statistics.median(found) if found else float("nan")

    def by_depth(self, operation: str = ALL) -> dict[str, float]:
        """Return the variance ratio of every block.

        Args:
            operation: Of which operation.

        Returns:
            Block, as the part of the parameters' names up to their first number, to Σ D² / Σ D²_SGD over its
            parameters, in the model's order.
        """
        return {block: _ratio(noise, sgd) for block, (noise, sgd) in self.totals(operation).items()}

    def totals(self, operation: str = ALL) -> dict[str, tuple[float, float]]:
        """Return the two variances of every block.

        Args:
            operation: Of which operation.

        Returns:
            Block, as for :meth:`by_depth`, to Σ D² and Σ D²_SGD over its parameters.
        """
        found: dict[str, tuple[float, float]] = {}
        for name, value in self.stand_ins[operation].items():
            noise, sgd = found.get(block := _block(name), (0.0, 0.0))
            found[block] = noise + value, sgd + self.sgd[name]
        return found

    def summary(self) -> str:
        """Return both ratios of the whole model, and how sure they are, in one line."""
        parts = []
        for name, value, error in zip(
            ("whole_gradient", "median_of_weights"), (self.whole(), self.median_of_weights()), self.errors()[::-1],
            strict=True,
        ):  # fmt: skip
            parts.append(
                f"{name}={value:.4g}" + (f" ± {100 * error / value:.0f} %" if error == error and value else "")
            )
        return keyed("rmm_linear noise:", (*parts, f"draws={len(self.draws.get(ALL, ())) or 'unknown'}"))

    def __str__(self) -> str:
        """Return a table: the median of the weights, the whole gradient, standard errors of both, a row per block."""
        return self._text({one: self.by_depth(one) for one in self.stand_ins})

    def table(self) -> str:
        """Return the same with a row for every parameter instead of every block.

        Returns:
            Text.
        """
        ratios = {
            one: {name: _ratio(noise, self.sgd[name]) for name, noise in found.items()}
            for one, found in self.stand_ins.items()
        }
        return self._text(ratios)

    def _text(self, ratios: Mapping[str, Mapping[str, float]]) -> str:
        operations = list(self.stand_ins)
        errors = [self.errors(one) for one in operations]
        draws = len(self.draws.get(ALL, ()))
        rows = [("median of weights", *(f"{self.median_of_weights(one):.4f}" for one in operations))]
        rows += [(f"  ± over {draws} draws", *(f"{one:.4f}" for one, _ in errors))] if draws > 1 else []
        rows += [("whole gradient", *(f"{self.whole(one):.4f}" for one in operations))]
        rows += [(f"  ± over {draws} draws", *(f"{one:.4f}" for _, one in errors))] if draws > 1 else []
        count = len(rows)
        rows += [(block, *(f"{ratios[one][block]:.4f}" for one in operations)) for block in ratios[ALL]]
        text = f"{self.summary()}\n{named_table(('variance ratio', *operations), rows, heads=count)}"
        return text if draws > 1 else f"{text}\n{wrapped(_NO_ERRORS, 2)}"

    def _records(self) -> list[dict[str, Any]]:
        return [
            {
                "parameter": name,
                "operation": operation,
                "noise": noise,
                "sgd": self.sgd[name],
                "ratio": _ratio(noise, self.sgd[name]),
            }
            for operation, found in self.stand_ins.items()
            for name, noise in found.items()
        ]


def gradient_noise(
    model: nn.Module,
    batch: Mapping[str, Any],
    config: RMMConfig | None = None,
    *,
    draws: int = 4,
    by_operation: bool = True,
    progress: bool | None = None,
) -> GradientNoise:
    """Measure the variance that a conversion adds to the gradient of every parameter.

    A converted model is measured as it is converted, with what it has learned. Any other is converted as by ``config``,
    learns from this batch what modules learn in their first steps, and is reverted afterwards. Parameters, their
    ``grad``, buffers, modes, everything that a conversion has learned and torch's random number generators are left as
    they were, so training goes on to the bit as without it.

    "dropout", "pooling" and "logits" are exact, the last but for the order of summation, and are measured by themselves
    only if there is nothing else. Operations that the model has no module of are left out.

    BatchNorm in training mode normalizes each sequence by itself where D²_SGD is measured, so that this is another
    model's (a warning says so).

    Cost: one pass over each sequence, one over the batch (two more, without gradients, where ``num_items_in_batch`` is
    given), and ``draws`` over the batch for all operations together and
    for each one. Memory: that of an exact step, and about four more copies of the parameters.

    Args:
        model: A model that returns an object with a ``loss``, converted or not, without wrappers.
        batch: Its keyword arguments, tensors of n sequences; padding is at the right or left.
        config: As for :func:`rmm_linear.convert`; None for a converted model.
        draws: How often the gradient is computed with new random numbers.
        by_operation: Whether each operation is measured by itself too.
        progress: Whether to say on stderr how far it is. None: on a terminal, or where the library's logger is at INFO.

    Returns:
        D² and D²_SGD of every parameter. Print it.

    Raises:
        ValueError: If the batch has fewer than two sequences or no loss, a ``config`` is given for a converted model,
            the model has sketched layers that :func:`rmm_linear.convert` did not make, nothing can be converted, or the
            parameters are frozen or sharded.
    """
    check_integer("draws", draws)
    passes = Passes(model, batch)
    # A model in eval mode is set to training for the passes; of one in training mode, parts in eval mode stay so.
    norms = [one for one in model.modules() if isinstance(one, _BatchNorm) and (one.training or not model.training)]
    if norms and model not in _WARNED:
        _WARNED.add(model)
        logger.warning(
            "The minibatch's variance comes from passes over single sequences, by which BatchNorm normalizes there: "
            "the ratio may be wrong by a factor of two. Set BatchNorm layers to eval mode for the measurement."
        )
    with reporting("gradient_noise", progress), measuring(model), _converted(passes, config) as learning:
        there = {module.rmm_operation for module in converted_modules(model)}
        alone = [one for one in OPERATIONS if one in there and one not in _NOISELESS] or sorted(there)
        measured = [ALL, *(alone if by_operation and there != {*alone[:1]} else ())]
        single = 1 + _OVERHEAD * sequences_in(dict(batch))
        expect(_CONVERTED * (learning + draws * len(measured)) + single + 1, what="variance of the whole gradient: ")
        with restored(model):
            for _ in range(learning):
                passes.gradients()
        with set_aside(model) as contexts, counting("variance of the whole gradient", 1 + len(measured)) as begins:
            begins("of the minibatch")
            with exact_but(model):
                sgd, exact = passes.sgd_variance(), passes.gradients()

            def squares(operations: Sequence[str]) -> list[dict[str, float]]:
                """Return ‖ĝ − g‖² of every draw and parameter."""
                found = list[dict[str, float]]()
                with exact_but(model, operations):
                    for draw in range(1, draws + 1):
                        for context in contexts:
                            context.salt = draw
                        errors = map(_square, passes.gradients(), exact)
                        found.append(dict(zip(passes.trained, errors, strict=True)))
                return found

            by_draw = dict[str, list[dict[str, float]]]()
            for one in measured:
                begins(f"of {one}")
                by_draw[one] = squares(OPERATIONS if one == ALL else [one])
            if by_operation and there == {*alone[:1]}:
                by_draw[alone[0]] = by_draw[ALL]
    embeddings = {
        parameter for module in model.modules() if isinstance(module, nn.Embedding) for parameter in module.parameters()
    }
    weights = tuple(name for name, p in passes.trained.items() if p.dim() > 1 and p not in embeddings)
    means = {one: {name: sum(d[name] for d in found) / draws for name in sgd} for one, found in by_draw.items()}
    return GradientNoise(sgd, means, weights, by_draw)


@contextmanager
def _converted(passes: Passes, config: RMMConfig | None) -> Iterator[int]:
    """Have a model converted inside of the block; in so many passes it has to learn first."""
    model = passes.model
    modules = converted_modules(model)
    if not modules:
        convert(model, config)
        try:
            yield STEPS + 2
        finally:
            unconvert(model)
        return
    if config is not None:
        raise ValueError(
            "config must be None for a converted model, which is measured as it is converted, got an RMMConfig. Leave "
            "it out, or call rmm_linear.revert(model) first."
        )
    if any(module.rmm_context is None for module in modules):
        raise ValueError(
            "gradient_noise needs sketched layers that convert made, got one made by itself. Make it an nn.Linear and "
            "call rmm_linear.convert(model)."
        )
    yield 0


def _square(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).square().sum())


def _block(name: str) -> str:
    found = re.match(r"(.*?\.\d+)\.", name)
    return found[1] if found else name.split(".")[0] if "." not in name else ".".join(name.split(".")[:2])


def _ratio(noise: float, sgd: float) -> float:
    return noise / sgd if sgd else (0.0 if not noise else float("inf"))

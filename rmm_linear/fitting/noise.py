"""Measure the variance that compression adds to the example's gradient, by block and setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rmm_linear._support.progress import counting
from rmm_linear.conversion.exact import set_aside
from rmm_linear.memory.inputs import LossOfBatch, call_with, restored, sequences_in
from rmm_linear.planning.blocks.find import owner_of
from rmm_linear.planning.blocks.measure import BlockCost
from rmm_linear.planning.blocks.plan import CONVERT, KEEP, RECOMPUTE, BlockPlan, PlannedBlock, label_of
from rmm_linear.planning.step.step import copied, has_loss, loss_of
from rmm_linear.variance.passes import Passes, measuring

DRAWS = 2
PASSES = 32  # for D²_SGD, at most: of larger batches, several sequences in each
_PREFIX = "model."
_COUNT = "num_items_in_batch"  # so transformers calls what divides a loss that is a sum over sequences


@dataclass
class BlockNoise:
    """The noise of one setting in one block."""

    worst: float = 0.0  # the largest variance ratio, D² / D²_SGD, of a layer's weights
    total: float = 0.0  # Σ D² over the block's parameters, divided by Σ D²_SGD of the whole model


@dataclass
class Noise:
    """Noise by setting and block, or why it is not known."""

    found: dict[str, dict[str, BlockNoise]] = field(default_factory=dict)  # setting to block to its noise
    unknown: str = ""  # why it was not measured; empty if it was


def measure_noise(
    model: nn.Module, example: Any, blocks: Sequence[BlockCost], plans: Mapping[str, BlockPlan], draws: int = DRAWS
) -> Noise:
    """Measure the noise of settings, each with all blocks that have it at once.

    The exact gradient, and D²_SGD over the sequences of the batch in at most 32 parts, come from passes that recompute
    all blocks, so that they take little memory. As in :func:`rmm_linear.variance.gradient_noise`, dropout draws the
    same masks every time.
    """
    try:
        again = [PlannedBlock(block.name, KEEP if block.writes_input else RECOMPUTE) for block in blocks]
        with restored(model), measuring(model), counting("measuring variance", 1 + len(plans)) as begins:
            passes = _passes(model, example)
            names = [name.removeprefix(_PREFIX) for name in passes.trained]
            begins("of the minibatch")
            sgd, exact = _exact(passes, BlockPlan(again).made_for(model))
            found = {}
            for setting, plan in plans.items():
                begins(label_of(f"{CONVERT} {setting}"))
                with plan.applied(model):
                    noise = dict(zip(names, _squares(passes, model, exact, draws), strict=True))
                parameters = dict(model.named_parameters())
                is_weight = {name: parameters[name].dim() > 1 for name in names}
                found[setting] = _by_block(noise, dict(zip(names, sgd, strict=True)), is_weight, blocks)
    except torch.OutOfMemoryError:
        return Noise(unknown="the passes that measure it ran out of memory")
    except (ValueError, RuntimeError) as error:  # of a model that takes no single sequence, for example
        return Noise(unknown=str(error).strip().partition("\n")[0].partition(". ")[0])
    return Noise(found)


def _exact(passes: Passes, again: BlockPlan) -> tuple[list[float], list[Tensor]]:
    """D²_SGD and the gradient of every parameter."""

    def run() -> tuple[list[float], list[Tensor]]:
        return list(passes.sgd_variance(PASSES).values()), [gradient.clone() for gradient in passes.gradients()]

    try:
        with again.applied():
            return run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of a block that cannot run again
        return run()


def _squares(passes: Passes, model: nn.Module, exact: Sequence[Tensor], draws: int) -> list[float]:
    """Return the mean of ‖ĝ − g‖² over draws, for every parameter."""
    sums = [0.0] * len(exact)
    with set_aside(model) as contexts:
        for draw in range(1, draws + 1):
            for context in contexts:
                context.salt = draw
            for place, (one, right) in enumerate(zip(passes.gradients(), exact, strict=True)):
                sums[place] += float((one.double() - right.double()).square().sum()) / draws
    return sums


def _by_block(
    noise: Mapping[str, float], sgd: Mapping[str, float], is_weight: Mapping[str, bool], blocks: Sequence[BlockCost]
) -> dict[str, BlockNoise]:
    total = sum(sgd.values())
    found = {block.name: BlockNoise() for block in blocks}
    for name, value in noise.items():
        owner = owner_of(name, found)
        if owner is None:
            continue
        block = found[owner]
        block.total += value / total if total else 0.0
        if is_weight[name] and value:
            block.worst = max(block.worst, value / sgd[name] if sgd[name] else float("inf"))
    return found


class _WithLoss(nn.Module):
    """A model that is called with the tensors of a batch by name, whatever its form, and returns its loss."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model, self.of = model, example.of if isinstance(example, LossOfBatch) else None
        example = example.batch if isinstance(example, LossOfBatch) else example
        self.named = isinstance(example, Mapping)
        self.leaves, self.form = (dict(example), None) if self.named else tree_flatten(example)

    @property
    def batch(self) -> dict[str, Any]:
        """The tensors of the batch, by key or by place, and the number that a loss is divided by."""
        items = self.leaves.items() if isinstance(self.leaves, dict) else enumerate(self.leaves)
        return {str(key): leaf for key, leaf in items if isinstance(leaf, Tensor) or key == _COUNT}

    def call(self, **given: Any) -> Any:
        """Run the model on copies, as it may change what it is given."""
        tensors = copied(given)
        if isinstance(self.leaves, dict):
            named = {key: tensors.get(key, leaf) for key, leaf in self.leaves.items()}
            return self.model(**named) if self.of is None else self.of(named)
        leaves = [tensors.get(str(place), leaf) for place, leaf in enumerate(self.leaves)]
        assert self.form is not None  # noqa: S101
        return call_with(self.model, tree_unflatten(leaves, self.form))

    def forward(self, **tensors: Any) -> dict[str, Tensor]:
        return {"loss": loss_of(self.call(**tensors))}


def _passes(model: nn.Module, example: Any) -> Passes:
    """Prepare passes of a model that returns a loss, and is called by keyword."""
    if isinstance(example, LossOfBatch):
        labels = example.batch.get("labels")
        if not isinstance(labels, Tensor) or sequences_in(dict(example.batch)) != len(labels):
            raise ValueError("the Trainer's loss is that of a whole batch, of which no sequence can be taken")
    elif callable(example):
        raise ValueError("a function as the example is one batch, of which no sequence can be taken")
    wrapped = _WithLoss(model, example)
    batch = wrapped.batch
    with torch.no_grad():
        output = wrapped.call(**batch)
    return Passes(wrapped, batch, None if has_loss(output) else True)

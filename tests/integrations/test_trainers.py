"""Passes through a Trainer's loss leave no trace in it, and its inputs are prepared once."""

from collections import Counter, defaultdict, deque
from contextlib import nullcontext

import torch
from torch import nn

from rmm_linear.integrations.fit_training import is_same_loss
from rmm_linear.integrations.trainers import around_next_step, loss_call, prepared_inputs, untraced


class Counting:
    """Counts as TRL's trainers do: in its loss, and where it prepares inputs."""

    compute_loss_context_manager = staticmethod(nullcontext)

    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.tokens, self.sum, self.names = 0, torch.zeros(2), {"a"}
        self.metrics = {"train": defaultdict(list)}
        self.logs = {"texts": deque([1], maxlen=2), "counts": Counter(a=1)}
        self.data = [{"x": torch.ones(3)}] * 20_000  # is not copied
        self.prepared = 0

    def compute_loss(self, model, inputs):
        self.tokens += 3
        self.metrics["train"]["entropy"].append(self.tokens)
        self.logs["texts"].append("more")
        self.logs["counts"]["a"] += 1
        self.sum += 1
        self.names.add("b")
        self.metrics = dict(self.metrics)
        self.new = 1
        inputs.pop("extra")
        return model(inputs["x"]).sum()

    def _prepare_inputs(self, inputs):
        self.prepared += 1
        return {"x": torch.ones(2), "extra": 1}

    def training_step(self, model, inputs):
        return self.compute_loss(model, self._prepare_inputs(inputs))


def test_what_a_loss_counts_is_as_before():
    trainer = Counting()
    metrics, total = trainer.metrics, trainer.sum
    trainer.metrics["train"]["entropy"].append(7)
    loss = loss_call(trainer, trainer.model, {"x": torch.ones(2), "extra": 1})
    assert torch.equal(loss(), loss())
    assert trainer.metrics is metrics
    assert trainer.metrics == {"train": {"entropy": [7]}}
    assert (trainer.tokens, trainer.names, trainer.logs) == (0, {"a"}, {"texts": deque([1]), "counts": Counter(a=1)})
    assert trainer.sum is total
    assert trainer.sum.tolist() == [0, 0]
    assert not hasattr(trainer, "new")
    with untraced(trainer):
        del trainer.tokens
    assert trainer.tokens == 0


def test_inputs_are_prepared_once_for_all_that_look_at_them():
    trainer, seen = Counting(), []

    def look(step, model, inputs):
        seen.append(prepared_inputs(trainer, inputs))
        return step(model, inputs)

    for _ in range(2):
        around_next_step(trainer, [look, look])
        trainer.training_step(trainer.model, {})
    assert trainer.prepared == 2
    assert seen[0] is seen[1]
    assert seen[0] is not seen[2]
    assert not {"_prepare_inputs", "training_step"} & {*vars(trainer)}


def test_losses_are_the_same_but_for_the_order_of_a_sum():
    values = torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 10
    one, other = values.sum() / 5000, sum(values.tolist()) / 5000 * torch.ones(())
    for chunk in (7, 100):
        assert is_same_loss(one, torch.stack([part.sum() for part in values.split(chunk)]).sum() / 5000, 5000)
    assert is_same_loss(one, other, 5000)
    assert is_same_loss(one.bfloat16(), one, 5000)
    assert not is_same_loss(one, one * 1.001, 5000)
    assert not is_same_loss(one, one * 1.001, 1)

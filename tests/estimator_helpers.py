"""What the tests of norm estimators share: calls and batches of known shapes, and an estimator that writes down."""

import torch
from helpers import token_ids
from torch import nn

from rmm_linear import RMMLinear
from rmm_linear.estimators import LayerCall, NormEstimator
from rmm_linear.sketches import TokenMask

CPU = torch.device("cpu")


def call_of(batch, length, ids=None, index=None, mask=None):
    flat = None if ids is None else torch.tensor(ids).reshape(-1)
    numbers = None if index is None else torch.tensor(index)
    ranks = None if mask is None else TokenMask.of(torch.tensor(mask).reshape(-1))
    return LayerCall((batch, length), CPU, flat, numbers, ranks)


class Constant(NormEstimator):
    """Always expects the same, and remembers what it was told."""

    def __init__(self):
        self.seen = []

    def predict(self, call):
        return torch.ones(call.tokens)

    def observe(self, call, norms):
        self.seen.append((call, norms.clone()))


def batch_of(batch=4, length=20, first=0):
    ids = token_ids(batch, length) + first
    mask = torch.ones_like(ids)
    mask[:2, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def constants(model):
    return {n: m.rmm_estimator.seen for n, m in model.named_modules() if isinstance(m, RMMLinear) and m.rmm_estimator}


def enable(model, reentrant):
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x).square().mean()

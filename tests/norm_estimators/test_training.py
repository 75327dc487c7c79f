"""Training with norm estimators: unbiased while they learn, copies that learn on their own, LoRA."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from cases import WTA, plain_or_checkpoints
from estimator_helpers import batch_of
from helpers import tiny_model
from statistical import assert_unbiased
from torch import nn
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear import convert


class Tagger(nn.Module):
    """Reads ids and a mask, and recomputes its layer."""

    def __init__(self, reentrant):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(64, 12), nn.Linear(12, 6)
        self.reentrant = reentrant

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        x = self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return (x.sin() * attention_mask.unsqueeze(2)).square().sum()


@plain_or_checkpoints
@pytest.mark.parametrize("name", ["position", "token", "position_token", "sample_cache", "sequence_cache"])
def test_gradients_stay_unbiased_while_estimators_learn(name, reentrant):
    """Half of the rows: 30 draws then say as much as a hundred of a quarter, and estimators have learned after one."""
    torch.manual_seed(1)
    model, batch = Tagger(reentrant), {k: v for k, v in batch_of(8).items() if k != "labels"}
    model(**batch).backward()
    exact = model.layer.weight.grad.clone()
    convert(model, norm_estimator=name, **{**WTA, "ratio": 0.5})

    def gradient(_):
        model.zero_grad()
        model(**batch, sample_index=torch.arange(8)).backward()
        return model.layer.weight.grad

    assert_unbiased(gradient, exact, draws=30, widest=0.02)
    assert model.layer.rmm_estimator.bytes > 8


def test_copies_and_pickles_learn_on_their_own():
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, norm_estimator="position_token", target_modules=["query", "key"], **WTA)
    batch = batch_of()
    model(**batch).loss.backward()
    before = {name: tensor.clone() for name, tensor in rmm_linear.sketch_tensors(model).items()}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(**batch).loss.backward()
        query = twin.roberta.encoder.layer[0].attention.self.query
        assert query.rmm_context.estimators[query.rmm_index] is query.rmm_estimator
        now = rmm_linear.sketch_tensors(twin)
        assert now.keys() == before.keys()
        assert not torch.equal(now[next(iter(now))], before[next(iter(before))])
    assert all(torch.equal(before[name], tensor) for name, tensor in rmm_linear.sketch_tensors(model).items())


def test_nothing_of_a_step_outlives_its_backward_pass():
    model = tiny_model("roberta", dropout=0.0, layers=1).train()
    convert(model, norm_estimator="token", target_modules=["query"], **WTA)
    batch, calls = batch_of(), []
    estimator = model.roberta.encoder.layer[0].attention.self.query.rmm_estimator
    observe = estimator.observe
    estimator.observe = lambda call, norms: (calls.append(weakref.ref(call)), observe(call, norms))
    model(**batch).loss.backward()
    gc.collect()
    assert [call() for call in calls] == [None]
    assert all(tensor.grad_fn is None for tensor in rmm_linear.sketch_tensors(model).values())


class Lora(nn.Module):
    """A frozen layer beside a trained product of two small ones, the second from zero, as PEFT makes it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("name", ["none", "position_token"])
def test_lora_sketches_its_first_factor_and_the_frozen_base_keeps_nothing(name):
    from rmm_linear.memory import track_saved

    torch.manual_seed(0)
    model = nn.Sequential(Lora(nn.Linear(16, 16)), nn.Tanh(), Lora(nn.Linear(16, 16)))
    convert(model, norm_estimator=name, **WTA)
    x = torch.randn(4, 10, 16)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with track_saved(model) as kept:
            loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
    assert "0.base" not in kept.by_module
    assert kept.by_module["0.lora_A"] == 10 * 16 * 4 + 10 * 8  # K rows, their numbers and scales
    assert model[0].lora_A.weight.grad.abs().sum() > 0
    if name != "none":
        assert "position" not in model[0].base.rmm_estimator.tensors()
        assert float(model[0].lora_A.rmm_estimator.tensors()["unit"][1]) == pytest.approx(1.9)  # not of the first step

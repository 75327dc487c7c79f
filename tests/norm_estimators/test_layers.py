"""What layers tell their norm estimators, what becomes of what they expect, and training while they learn."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from cases import WTA, plain_or_checkpoints
from estimator_helpers import Constant, Plain, batch_of, call_of, constants, enable
from helpers import tiny_model, token_ids
from statistical import assert_unbiased
from torch import nn
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear import RMMConfig, RMMLinear, convert, revert
from rmm_linear.estimators import IndexedDataset, RunningNorms, register_norm_estimator, with_sample_index
from rmm_linear.ops.save import save_input


@plain_or_checkpoints
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_tell_their_estimators_the_norms_of_their_own_call(reentrant):
    """The norms are those of the gradient that a hook sees, the ids and numbers those of the batch."""
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, norm_estimator="constant", target_modules=["query", "output.dense"], **WTA)
    enable(model, reentrant)
    name = "roberta.encoder.layer.0.output.dense"
    gradients = []
    model.get_submodule(name).register_forward_hook(
        lambda module, args, output: (output.register_hook(gradients.append), None)[1] if output.requires_grad else None
    )
    batch = batch_of()
    model(**batch, sample_index=[7, 1, 3, 0]).loss.backward()
    ((call, norms),) = constants(model)[name]
    torch.testing.assert_close(norms, gradients[0].reshape(80, -1).norm(dim=1), rtol=1e-5, atol=0)
    assert (norms > 0).any()
    assert call.shape == (4, 20)
    assert torch.equal(call.input_ids, batch["input_ids"].reshape(-1))
    assert call.sample_index.tolist() == [7, 1, 3, 0]
    assert torch.equal(call.valid, batch["attention_mask"].reshape(-1).bool())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_recomputation_has_the_ids_of_its_own_forward_pass():
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, norm_estimator="constant", target_modules=["query"], mask_padding=False, **WTA)
    enable(model, True)
    first, second = batch_of(), batch_of(first=-1)
    losses = [model(**first).loss, model(**second).loss]
    for loss in losses:  # the first one's comes first, which is not the last forward pass
        loss.backward()
    for seen in constants(model).values():
        assert len(seen) == 2
        for (call, _), batch in zip(seen, (first, second), strict=True):
            assert torch.equal(call.input_ids, batch["input_ids"].view(-1))


def test_an_overflowing_step_and_a_frozen_layer_teach_nothing():
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, norm_estimator="position", target_modules=["query", "key", "value"], **WTA)
    batch = batch_of()
    model(**batch).loss.backward()
    state = lambda: {name: tensor.clone() for name, tensor in rmm_linear.sketch_tensors(model).items()}  # noqa: E731
    before = state()
    for factor in (math.inf, math.nan):
        (model(**batch).loss * factor).backward()
    after = state()
    assert all(torch.equal(before[name], after[name]) and after[name].isfinite().all() for name in before)
    for parameter in model.roberta.encoder.layer[0].attention.self.query.parameters():
        parameter.requires_grad_(False)
    model(**batch).loss.backward()
    frozen = "roberta.encoder.layer.0.attention.self.query:unit"
    assert torch.equal(state()[frozen], before[frozen])
    other = frozen.replace("layer.0", "layer.1")
    assert not torch.equal(state()[other], before[other])


def test_siblings_expect_the_root_of_their_squares():
    model = tiny_model("roberta", dropout=0.0).train()
    report = convert(model, norm_estimator="position", target_modules=["query", "key", "value"], **WTA)
    batch = batch_of()
    model(**batch).loss.backward()
    attention = model.roberta.encoder.layer[0].attention.self
    call = call_of(4, 20, mask=batch["attention_mask"].tolist())
    alone = [layer.rmm_estimator.predict(call) for layer in (attention.query, attention.key, attention.value)]
    joint = report.context.expected(attention.key.rmm_index, call)
    together = sum(norms.double().square() for norms in alone).sqrt().float()  # the norms are tiny here
    torch.testing.assert_close(joint, together, rtol=1e-5, atol=0)
    assert not torch.allclose(joint, alone[0], rtol=1e-2, atol=0)


def test_what_is_expected_reaches_the_draw():
    """A token that is expected to hold all of the gradient is one of wta's winners: always stored as it is."""

    class One(Constant):
        def predict(self, call):
            return torch.zeros(call.tokens).index_fill_(0, torch.tensor([33]), 1.0)

    register_norm_estimator("one", One)
    layer = RMMLinear(6, 4, config=RMMConfig(norm_estimator="one", **WTA))
    for seed in range(5):
        torch.manual_seed(seed)
        y = torch.zeros(40, 4).index_fill_(0, torch.tensor([33]), 1.0)
        x = torch.randn(40, 6)
        layer.zero_grad()
        layer(x).backward(y)
        torch.testing.assert_close(layer.weight.grad, y.T @ x)


def test_a_sibling_without_an_estimator_draws_by_what_the_others_expect(monkeypatch):
    """The first of the group makes the sketch for all of them."""
    model = tiny_model("roberta", dropout=0.0, layers=1).train()
    overrides = {name: {"norm_estimator": "none"} for name in ("query", "value")}
    convert(model, norm_estimator="position", target_modules=["query", "key", "value"], overrides=overrides, **WTA)
    attention = model.roberta.encoder.layer[0].attention.self
    assert attention.query.rmm_estimator is None
    batch, expected = batch_of(), []
    model(**batch).loss.backward()
    known = attention.key.rmm_estimator.predict(call_of(4, 20, mask=batch["attention_mask"].tolist()))

    def look(*args):
        expected.append(args[4])
        return save_input(*args)

    monkeypatch.setattr("rmm_linear.layers.function.save_input", look)
    model(**batch).loss.backward()
    (found,) = expected
    torch.testing.assert_close(found, known, rtol=1e-5, atol=0)


def check_learned(layer, run):
    """A layer's estimator by position has learned, in float32, from the norms that a hook sees in each sequence."""
    expected = RunningNorms(["position"])

    def observe(y):
        assert y.any()
        expected.observe(call_of(*y.shape[:2]), y.float().flatten(0, 1).norm(dim=1))

    layer.register_forward_hook(lambda module, args, output: (output.register_hook(observe), None)[1])
    run()
    found, wanted = layer.rmm_estimator.tensors(), expected.tensors()
    assert found.keys() == wanted.keys() == {"position", "unit"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_layer_by_itself_learns_by_position(dtype):
    layer = RMMLinear(6, 4, config=RMMConfig(norm_estimator="position", **WTA), dtype=dtype)

    def run():
        for _ in range(2):
            layer(torch.randn(3, 20, 6, dtype=dtype)).square().mean().backward()

    check_learned(layer, run)
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any()


def test_conv1d_tells_its_sequences():
    model = tiny_model("gpt2", dropout=0.0).train()
    convert(model, norm_estimator="position", target_modules=["c_fc"], **WTA)
    ids = token_ids()
    check_learned(model.transformer.h[0].mlp.c_fc, lambda: model(input_ids=ids, labels=ids).loss.backward())


# Training


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
    convert(model, norm_estimator="position_token", target_modules=["query", "key", "value"], **WTA)
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


# Numbers of a dataset's examples


def test_the_original_forward_never_sees_the_numbers():
    model, x = Plain().train(), torch.randn(3, 10, 8)
    convert(model, norm_estimator="constant", **WTA)
    model(x, sample_index=torch.tensor([5, 6, 7], dtype=torch.int32)).backward()
    ((call, _),) = model.layer.rmm_estimator.seen
    assert call.sample_index.tolist() == [5, 6, 7]
    model.eval()(x, sample_index=None)
    revert(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sample_index'"):
        model(x, sample_index=torch.arange(3))
    convert(model, norm_estimator="constant", **WTA)
    model.train()(x, sample_index=torch.arange(3)).backward()
    assert len(model.layer.rmm_estimator.seen) == 1


def test_a_forward_that_has_numbers_of_its_own_keeps_them():
    class Own(Plain):
        def forward(self, x, sample_index=None):
            assert sample_index.tolist() == [1, 2, 3]
            return super().forward(x)

    model = Own()
    convert(model, norm_estimator="constant", **WTA)
    model(torch.randn(3, 10, 8), sample_index=torch.tensor([1, 2, 3])).backward()
    assert model.layer.rmm_estimator.seen[0][0].sample_index.tolist() == [1, 2, 3]


@pytest.mark.parametrize("index", [torch.rand(3), torch.ones(3, 1, dtype=torch.long), torch.tensor(4), [True, False]])
def test_wrong_numbers_are_refused_and_the_model_goes_on(index):
    model, x = Plain(), torch.randn(3, 10, 8)
    convert(model, norm_estimator="constant", **WTA)
    with pytest.raises(TypeError, match="sample_index must have one integer for each example"):
        model(x, sample_index=index)
    model(x, sample_index=[1, 2]).backward()  # of another batch size: not used
    assert model.layer.rmm_estimator.seen[0][0].sample_index is None


def test_numbers_pass_by_a_collator_that_does_not_know_them():
    def collate(examples):
        assert all(set(example) == {"x"} for example in examples)
        return {"x": torch.stack([example["x"] for example in examples])}

    data = IndexedDataset([{"x": torch.full((2,), float(i))} for i in range(5)])
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True, collate_fn=with_sample_index(collate), num_workers=1)
    for batch in loader:
        assert torch.equal(batch["x"][:, 0].long(), batch["sample_index"])
    assert "sample_index" not in with_sample_index(collate)([{"x": torch.ones(2)}])
    with pytest.raises(TypeError, match="An example must be a dictionary, got tuple"):
        IndexedDataset([(1, 2)])[0]
    with pytest.raises(TypeError, match="An example must be a dictionary, got tuple"):
        with_sample_index(collate)([(1, 2)])
    with pytest.raises(TypeError, match="The collator's batch must be a dictionary, got list"):
        with_sample_index(list)([data[0]])
    with pytest.raises(TypeError, match="dataset must have a length"):
        IndexedDataset(iter([]))
    with pytest.raises(TypeError, match="collator must make a batch"):
        with_sample_index(None)

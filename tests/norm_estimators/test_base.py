"""What layers tell their norm estimators, and what becomes of what they expect."""

import math

import pytest
import torch
from cases import WTA, plain_or_checkpoints
from estimator_helpers import Constant, Plain, batch_of, call_of, constants, enable
from helpers import tiny_model, token_ids
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear import RMMConfig, RMMLinear, convert
from rmm_linear.estimators import RunningNorms, register_norm_estimator
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
    convert(model, norm_estimator="position", target_modules=["query"], **WTA)
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
    """A token that is expected to hold all of the gradient is one of wta's winners: kept as it is, always."""

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
    overrides = {"query": {"norm_estimator": "none"}}
    convert(model, norm_estimator="position", target_modules=["query", "key"], overrides=overrides, **WTA)
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


def test_a_layer_by_itself_learns_by_position():
    layer = RMMLinear(6, 4, config=RMMConfig(norm_estimator="position", **WTA))
    check_learned(layer, lambda: layer(torch.randn(3, 20, 6)).square().sum().backward())


def test_conv1d_tells_its_sequences():
    model = tiny_model("gpt2", dropout=0.0).train()
    convert(model, norm_estimator="position", target_modules=["c_fc"], **WTA)
    ids = token_ids()
    check_learned(model.transformer.h[0].mlp.c_fc, lambda: model(input_ids=ids, labels=ids).loss.backward())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    layer = RMMLinear(6, 4, config=RMMConfig(norm_estimator="position", **WTA), dtype=dtype)

    def run():
        for _ in range(2):
            layer(torch.randn(3, 20, 6, dtype=dtype)).square().mean().backward()

    check_learned(layer, run)
    assert layer.weight.grad.isfinite().all()
    assert layer.weight.grad.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_of_ones_own(reentrant):
    class Block(Plain):
        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=reentrant).square().mean()

    model = Block()
    convert(model, norm_estimator="constant", **WTA)
    model(torch.randn(3, 10, 8, requires_grad=True), sample_index=[2, 1, 0]).backward()
    ((call, norms),) = model.layer.rmm_estimator.seen
    assert call.sample_index.tolist() == [2, 1, 0]
    assert norms.shape == (30,)

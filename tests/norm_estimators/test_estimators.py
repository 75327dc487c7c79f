"""Norm estimators: what they learn, what they never learn, and what reaches them through a model."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from helpers import tiny_model, token_ids
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear import RMMConfig, RMMLinear, convert, revert
from rmm_linear.estimators import (
    IndexedDataset,
    LayerCall,
    NormEstimator,
    RunningNorms,
    SampleCache,
    make_norm_estimator,
    norm_estimators,
    register_norm_estimator,
    with_sample_index,
)
from rmm_linear.ops.save import keep
from rmm_linear.sketches import TokenMask

CPU = torch.device("cpu")
WTA = {"kind": "wta", "ratio": 0.25, "min_rows": 1}
checkpoints = pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])


def call_of(batch, length, ids=None, index=None, mask=None):
    flat = None if ids is None else torch.tensor(ids).reshape(-1)
    numbers = None if index is None else torch.tensor(index)
    ranks = None if mask is None else TokenMask.of(torch.tensor(mask).reshape(-1))
    return LayerCall((batch, length), CPU, flat, numbers, ranks)


# Running means


def test_a_mean_by_position_is_that_of_relative_squares_with_one_more_token():
    """By count: position 0 has seen (4 + 4)/2.5·..., all worked out by hand; the unit is the mean of the steps' RMS."""
    estimator = RunningNorms(["position"], decay=1.0)
    call = call_of(2, 2)
    estimator.observe(call, torch.tensor([2.0, 1.0, 2.0, 1.0]))  # squares 4, 1: mean 2.5
    estimator.observe(call, torch.tensor([30.0, 0.0, 30.0, 0.0]))  # squares 900, 0: mean 450
    first = (2 * 4 / 2.5 + 2 * 2 + 1) / 5
    second = (2 * 1 / 2.5 + 1) / 5
    unit = (math.sqrt(2.5) + math.sqrt(450)) / 2
    expected = unit * torch.tensor([first, second]).sqrt().repeat(2)
    torch.testing.assert_close(estimator.predict(call), expected)


def test_an_exponential_mean_forgets_and_its_weights_too():
    estimator = RunningNorms(["token"], decay=0.5)
    call = call_of(1, 2, ids=[[3, 4]])
    estimator.observe(call, torch.tensor([1.0, 0.0]))  # relative squares 2, 0
    estimator.observe(call, torch.tensor([0.0, 1.0]))  # 0, 2
    seven = estimator.predict(call_of(1, 3, ids=[[3, 4, 7]]))
    unit = math.sqrt(0.5)
    squares = torch.tensor([(0.5 * 2 + 0 + 1) / 2.5, (0 + 2 + 1) / 2.5, 1.0])
    torch.testing.assert_close(seven, unit * squares.sqrt())


@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e18])
def test_the_size_of_the_loss_does_not_matter(factor):
    """As under loss scaling, up to squares that float32 cannot hold."""
    norms = torch.tensor([4.0, 1.0, 2.0, 1.0, 3.0, 0.5])
    found = []
    for scale in (1.0, factor):
        estimator = RunningNorms(["position", "token"])
        call = call_of(2, 3, ids=[[5, 6, 7], [5, 8, 6]])
        for step in range(4):
            estimator.observe(call, norms.roll(step) * scale)
        found.append(estimator.predict(call))
    torch.testing.assert_close(found[1], found[0] * factor, rtol=1e-5, atol=0)


def test_what_was_never_seen_has_the_mean_of_all():
    estimator = RunningNorms(["token"], decay=1.0)
    estimator.observe(call_of(1, 4, ids=[[1, 1, 2, 2]]), torch.tensor([3.0, 3.0, 1.0, 1.0]))
    unseen, seen = estimator.predict(call_of(1, 2, ids=[[9, 1]]))
    assert unseen == pytest.approx(math.sqrt(5))  # the root mean square of the step
    assert seen > unseen


def test_ids_collide_only_modulo_the_buckets():
    estimator = RunningNorms(["token"], decay=1.0, buckets=8)
    estimator.observe(call_of(1, 2, ids=[[1, 2]]), torch.tensor([3.0, 1.0]))
    one, nine, two, missing = estimator.predict(call_of(1, 4, ids=[[1, 9, 2, -7]]))
    assert one == nine == missing > two
    assert estimator.bytes == 2 * 8 * 4 + 8


def test_both_keys_explain_a_product():
    """‖y‖² = a(position) · b(token) without noise: the product finds it where each key alone cannot."""
    generator = torch.Generator().manual_seed(0)
    by_place, by_token = torch.tensor([9.0, 3.0, 1.0, 0.5]), torch.tensor([4.0, 1.0, 0.25])
    estimators = {name: make_norm_estimator(name) for name in ("position", "token", "position_token")}

    def draw():
        ids = torch.randint(3, (64, 4), generator=generator)
        return ids, (by_place * by_token[ids]).sqrt().reshape(-1)

    for _ in range(30):
        ids, norms = draw()
        for estimator in estimators.values():
            estimator.observe(call_of(64, 4, ids=ids.tolist()), norms)
    ids, norms = draw()
    wrong = {}
    for name, estimator in estimators.items():
        ratio = estimator.predict(call_of(64, 4, ids=ids.tolist())) / norms
        wrong[name] = float(ratio.log().std())
    assert wrong["position_token"] < 0.03 < 0.3 < min(wrong["position"], wrong["token"])


def test_padding_teaches_nothing_and_positions_begin_after_it():
    mask = [[0, 0, 1, 1], [1, 1, 1, 1]]
    estimator = RunningNorms(["position"], decay=1.0)
    estimator.observe(call_of(2, 4, mask=mask), torch.tensor([99.0, 99, 2, 1, 2, 1, 3, 3]))
    other = RunningNorms(["position"], decay=1.0)
    other.observe(call_of(2, 4, mask=[[1, 1, 0, 0], [1, 1, 1, 1]]), torch.tensor([2.0, 1, 77, 77, 2, 1, 3, 3]))
    assert torch.equal(estimator.tensors()["position"], other.tensors()["position"])
    assert float(estimator.tensors()["position"][1].sum()) == 6


def test_longer_sequences_come_later():
    estimator = RunningNorms(["position"], decay=1.0)
    estimator.observe(call_of(1, 2), torch.tensor([2.0, 1.0]))
    before = estimator.predict(call_of(1, 2))
    assert torch.equal(estimator.predict(call_of(1, 5))[:2], before)
    estimator.observe(call_of(1, 5), torch.ones(5))
    assert estimator.tensors()["position"].shape == (2, 5)


def test_a_step_without_any_gradient_teaches_nothing():
    estimator = RunningNorms(["position"])
    call = call_of(1, 3)
    estimator.observe(call, torch.tensor([3.0, 2.0, 1.0]))
    before = {name: tensor.clone() for name, tensor in estimator.tensors().items()}
    estimator.observe(call, torch.zeros(3))
    assert all(torch.equal(before[name], tensor) for name, tensor in estimator.tensors().items())


def test_an_estimator_that_saw_zeros_only_expects_the_same_of_all_tokens():
    estimator = RunningNorms(["position"])
    call = call_of(1, 3)
    estimator.observe(call, torch.zeros(3))
    known = estimator.predict(call)
    assert (known > 0).all()
    assert len(set(known.tolist())) == 1


@pytest.mark.parametrize("name", norm_estimators()[1:])
def test_an_empty_or_unknown_call_is_harmless(name):
    estimator = make_norm_estimator(name)
    assert estimator.predict(call_of(1, 3)) is None
    estimator.observe(LayerCall((0, 4), CPU), torch.zeros(0))
    estimator.observe(LayerCall((6,), CPU), torch.ones(6))
    assert estimator.predict(LayerCall((6,), CPU)) is None


def run_on_fakes(estimator):
    """Predict and learn with tensors that have no numbers: whoever asks for one would wait for an accelerator."""
    with FakeTensorMode():
        index = torch.zeros(4, dtype=torch.int64)
        call = LayerCall((4, 16), CPU, torch.zeros(64, dtype=torch.int64), index, TokenMask.of(torch.ones(64)))
        for _ in range(2):
            estimator.predict(call)
            estimator.observe(call, torch.ones(64))
        return estimator.predict(call)


@pytest.mark.parametrize("name", ["position", "token", "position_token"])
def test_running_means_never_wait_for_the_device(name):
    assert run_on_fakes(make_norm_estimator(name)).shape == (64,)
    with pytest.raises(DataDependentOutputException):
        run_on_fakes(SampleCache())  # which does, and says so


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"by": "position"}, ValueError, "by must list"),
        ({"by": []}, ValueError, "by must list"),
        ({"by": ["token", "token"]}, ValueError, "by must list"),
        ({"by": ["place"]}, ValueError, "by must list"),
        ({"by": ["token"], "decay": 0}, ValueError, r"decay must be in \(0, 1\]"),
        ({"by": ["token"], "decay": True}, ValueError, r"decay must be in \(0, 1\]"),
        ({"by": ["token"], "buckets": 0}, ValueError, "buckets must be at least 1"),
        ({"by": ["token"], "buckets": 1.5}, TypeError, "buckets must be a positive integer"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        RunningNorms(**options)


# The sample cache


def test_a_cache_recalls_an_example_wherever_it_comes_again():
    cache = SampleCache()
    cache.observe(call_of(2, 3, index=[4, 0]), torch.tensor([4.0, 2, 1, 1, 3, 5]))
    again = cache.predict(call_of(2, 3, index=[0, 4]))
    torch.testing.assert_close(again, torch.tensor([1.0, 3, 5, 4, 2, 1]), rtol=2**-7, atol=0)


def test_examples_that_are_not_known_have_the_mean_of_the_others():
    cache = SampleCache()
    cache.observe(call_of(1, 2, index=[1]), torch.tensor([3.0, 1.0]))
    assert cache.predict(call_of(2, 2, index=[0, 7])) is None
    known = cache.predict(call_of(2, 2, index=[7, 1]))
    torch.testing.assert_close(known, torch.tensor([5.0, 5, 9, 1]).sqrt(), rtol=2**-7, atol=0)


def test_the_mean_for_unknown_examples_is_that_of_tokens_that_count():
    cache = SampleCache()
    cache.observe(call_of(1, 4, index=[1], mask=[[1, 1, 0, 0]]), torch.tensor([3.0, 1.0, 0, 0]))
    known = cache.predict(call_of(2, 6, index=[1, 7], mask=[[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]))
    torch.testing.assert_close(known[[0, 1, 6, 7, 8]], torch.tensor([9.0, 1, 5, 5, 5]).sqrt(), rtol=2**-7, atol=0)


def test_a_cache_follows_tokens_through_padding_of_any_side_and_width():
    cache = SampleCache()
    cache.observe(call_of(1, 4, index=[2], mask=[[0, 0, 1, 1]]), torch.tensor([9.0, 9, 4, 2]))
    known = cache.predict(call_of(1, 3, index=[2], mask=[[1, 1, 0]]))
    torch.testing.assert_close(known[:2], torch.tensor([4.0, 2.0]), rtol=2**-7, atol=0)


def test_a_sequence_cache_has_one_number_for_each():
    cache = SampleCache(per_token=False)
    cache.observe(call_of(2, 2, index=[1, 0], mask=[[1, 0], [1, 1]]), torch.tensor([2.0, 0, 3, 1]))
    torch.testing.assert_close(
        cache.predict(call_of(2, 2, index=[0, 1])), torch.tensor([5.0, 5, 4, 4]).sqrt(), rtol=2**-7, atol=0
    )
    assert cache.bytes == 2 * 2 + 8


def test_a_cache_is_bounded_and_says_so():
    cache = SampleCache(max_bytes=2 * 3 * 4)  # 4 examples of 3 tokens
    norms = torch.tensor([1.0, 2, 3, 3, 2, 1])
    with pytest.warns(RuntimeWarning, match="sees example 9: those from number 4 on are not remembered"):
        cache.observe(call_of(2, 3, index=[9, 3]), norms)
    cache.observe(call_of(2, 3, index=[11, 3]), norms)  # once is enough; warnings are errors here
    assert cache.bytes == 2 * 3 * 4 + 8
    assert cache.predict(call_of(1, 3, index=[9])) is None
    torch.testing.assert_close(cache.predict(call_of(1, 3, index=[3])), norms[3:], rtol=2**-6, atol=0)


def test_numbers_below_zero_are_nobody():
    cache = SampleCache()
    cache.observe(call_of(1, 2, index=[-1]), torch.ones(2))
    assert cache.bytes == 0
    assert cache.predict(call_of(1, 2, index=[-1])) is None


@pytest.mark.parametrize(("options", "error"), [({"per_token": 1}, TypeError), ({"max_bytes": 0}, ValueError)])
def test_wrong_options_of_a_cache_are_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        SampleCache(**options)


# Names


class Constant(NormEstimator):
    """Always expects the same, and remembers what it was told."""

    def __init__(self):
        self.seen = []

    def predict(self, call):
        return torch.ones(call.tokens)

    def observe(self, call, norms):
        self.seen.append((call, norms.clone()))


@pytest.fixture(autouse=True)
def _constant():
    register_norm_estimator("constant", Constant)


def test_ones_own_estimator_has_a_name():
    assert "constant" in norm_estimators()
    assert RMMConfig.from_dict(RMMConfig(kind="wta", norm_estimator="constant").to_dict()).norm_estimator == "constant"
    register_norm_estimator("wrong", dict)
    with pytest.raises(TypeError, match="'wrong' must make a NormEstimator, got dict"):
        make_norm_estimator("wrong")


@pytest.mark.parametrize(("name", "factory"), [("token", Constant), ("", Constant), (3, Constant), ("new", None)])
def test_names_and_factories_are_checked(name, factory):
    with pytest.raises((TypeError, ValueError), match=r"must be new|must make an estimator"):
        register_norm_estimator(name, factory)


def test_a_configuration_with_a_wrong_estimator_is_refused():
    with pytest.raises(ValueError, match=r"must be one of none, position, .* got 'tokens'"):
        RMMConfig(kind="wta", norm_estimator="tokens")
    with pytest.raises(ValueError, match="got 'token' with kind='rows'"):
        RMMConfig(kind="rows", norm_estimator="token")
    with pytest.raises(ValueError, match=r"overrides\['query'\]: norm_estimator is for"):
        RMMConfig(kind="wta", norm_estimator="token", overrides={"query": {"kind": "rows"}})


# Through layers and models


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


@checkpoints
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
    assert torch.equal(call.real, batch["attention_mask"].reshape(-1).bool())


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


@checkpoints
@pytest.mark.parametrize("name", ["position", "token", "position_token", "sample_cache", "sequence_cache"])
def test_gradients_stay_unbiased_while_estimators_learn(name, reentrant):
    """Projection of the estimate on the exact gradient: 1 at z = 4, where a draw of another S would give 0.

    Half of the rows: 30 draws then say as much as a hundred of a quarter, and estimators have learned after one.
    """
    torch.manual_seed(1)
    model, batch = Tagger(reentrant), {k: v for k, v in batch_of(8).items() if k != "labels"}
    model(**batch).backward()
    exact = model.layer.weight.grad.clone()
    convert(model, norm_estimator=name, **{**WTA, "ratio": 0.5})
    values = []
    for _ in range(30):
        model.zero_grad()
        model(**batch, sample_index=torch.arange(8)).backward()
        values.append(float((model.layer.weight.grad * exact).sum() / exact.square().sum()))
    values = torch.tensor(values)
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - 1) < 4 * error
    assert error < 0.02
    assert model.layer.rmm_estimator.bytes > 8


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
    joint = report.scope.expected(attention.key.rmm_index, call)
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
    monkeypatch.setattr("rmm_linear.layers.functional.keep", lambda *args: (expected.append(args[4]), keep(*args))[1])
    model(**batch).loss.backward()
    (found,) = expected
    torch.testing.assert_close(found, known, rtol=1e-5, atol=0)


def test_a_layer_by_itself_learns_by_position():
    layer = RMMLinear(6, 4, config=RMMConfig(norm_estimator="position", **WTA))
    layer(torch.randn(3, 20, 6)).square().sum().backward()
    assert layer.rmm_estimator.tensors()["position"].shape == (2, 20)


def test_conv1d_tells_its_sequences():
    model = tiny_model("gpt2", dropout=0.0).train()
    convert(model, norm_estimator="position", target_modules=["c_fc"], **WTA)
    ids = token_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.transformer.h[0].mlp.c_fc.rmm_estimator.tensors()["position"].shape == (2, 20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    layer = RMMLinear(6, 4, config=RMMConfig(norm_estimator="position", **WTA), dtype=dtype)
    for _ in range(2):
        layer(torch.randn(3, 20, 6, dtype=dtype)).square().mean().backward()
    tensors = layer.rmm_estimator.tensors()
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in tensors.values())
    assert layer.weight.grad.isfinite().all()


# Dataset indices


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x).square().mean()


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


# Copies


def test_copies_and_pickles_learn_on_their_own():
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, norm_estimator="position_token", target_modules=["query", "key"], **WTA)
    batch = batch_of()
    model(**batch).loss.backward()
    before = {name: tensor.clone() for name, tensor in rmm_linear.sketch_tensors(model).items()}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(**batch).loss.backward()
        query = twin.roberta.encoder.layer[0].attention.self.query
        assert query.rmm_scope.estimators[query.rmm_index] is query.rmm_estimator
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


# LoRA


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

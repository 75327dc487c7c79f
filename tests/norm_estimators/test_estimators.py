"""Norm estimators: running means, caches of samples, names; what they learn and never learn, and refusals."""

import math

import pytest
import torch
from estimator_helpers import CPU, Constant, call_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rmm_linear import RMMConfig
from rmm_linear.estimators import (
    LayerCall,
    RunningNorms,
    SampleCache,
    make_norm_estimator,
    norm_estimators,
    register_norm_estimator,
)
from rmm_linear.sketches import TokenMask

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
    """After one alone, the same is expected of all tokens."""
    estimator, call = RunningNorms(["position"]), call_of(1, 3)
    estimator.observe(call, torch.zeros(3))
    first = estimator.predict(call)
    assert first[0] > 0
    assert (first == first[0]).all()
    estimator.observe(call, torch.tensor([3.0, 2.0, 1.0]))
    before = {name: tensor.clone() for name, tensor in estimator.tensors().items()}
    estimator.observe(call, torch.zeros(3))
    assert all(torch.equal(before[name], tensor) for name, tensor in estimator.tensors().items())


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


# Caches of samples


def test_a_cache_recalls_an_example_wherever_it_comes_again():
    cache = SampleCache()
    cache.observe(call_of(2, 3, index=[4, 0]), torch.tensor([4.0, 2, 1, 1, 3, 5]))
    again = cache.predict(call_of(2, 3, index=[0, 4]))
    torch.testing.assert_close(again, torch.tensor([1.0, 3, 5, 4, 2, 1]), rtol=2**-7, atol=0)


def test_examples_that_are_not_known_have_the_mean_of_the_others_tokens_that_count():
    cache = SampleCache()
    cache.observe(call_of(1, 4, index=[1], mask=[[1, 1, 0, 0]]), torch.tensor([3.0, 1.0, 0, 0]))
    assert cache.predict(call_of(2, 2, index=[0, 7])) is None
    known = cache.predict(call_of(2, 3, index=[7, 1], mask=[[1, 1, 1], [1, 1, 0]]))
    torch.testing.assert_close(known[:5], torch.tensor([5.0, 5, 5, 9, 1]).sqrt(), rtol=2**-7, atol=0)


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


def test_numbers_below_zero_are_no_examples():
    cache = SampleCache()
    cache.observe(call_of(1, 2, index=[-1]), torch.ones(2))
    assert cache.bytes == 0
    assert cache.predict(call_of(1, 2, index=[-1])) is None


# Names and options


@pytest.mark.parametrize("name", norm_estimators()[1:])
def test_an_empty_or_unknown_call_is_harmless(name):
    estimator = make_norm_estimator(name)
    assert estimator.predict(call_of(1, 3)) is None
    estimator.observe(LayerCall((0, 4), CPU), torch.zeros(0))
    estimator.observe(LayerCall((6,), CPU), torch.ones(6))
    assert estimator.predict(LayerCall((6,), CPU)) is None


def test_ones_own_estimator_has_a_name():
    assert "constant" in norm_estimators()
    assert RMMConfig.from_dict(RMMConfig(kind="wta", norm_estimator="constant").to_dict()).norm_estimator == "constant"


def wrong():
    register_norm_estimator("wrong", dict)
    make_norm_estimator("wrong")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RunningNorms(by="position"), ValueError, "by must list"),
        (lambda: RunningNorms(by=[]), ValueError, "by must list"),
        (lambda: RunningNorms(by=["token", "token"]), ValueError, "by must list"),
        (lambda: RunningNorms(by=["place"]), ValueError, "by must list"),
        (lambda: RunningNorms(by=["token"], decay=0), ValueError, r"decay must be in \(0, 1\]"),
        (lambda: RunningNorms(by=["token"], decay=True), ValueError, r"decay must be in \(0, 1\]"),
        (lambda: RunningNorms(by=["token"], buckets=0), ValueError, "buckets must be at least 1"),
        (lambda: RunningNorms(by=["token"], buckets=1.5), TypeError, "buckets must be a positive integer"),
        (lambda: SampleCache(per_token=1), TypeError, "per_token"),
        (lambda: SampleCache(max_bytes=0), ValueError, "max_bytes"),
        (wrong, TypeError, "'wrong' must make a NormEstimator, got dict"),
        (lambda: register_norm_estimator("token", Constant), ValueError, "must be new"),
        (lambda: register_norm_estimator("", Constant), ValueError, "must be new"),
        (lambda: register_norm_estimator(3, Constant), ValueError, "must be new"),
        (lambda: register_norm_estimator("new", None), TypeError, "must make an estimator"),
        (
            lambda: RMMConfig(kind="wta", norm_estimator="tokens"),
            ValueError,
            r"must be one of none, position, .* got 'tokens'",
        ),
        (lambda: RMMConfig(kind="rows", norm_estimator="token"), ValueError, "got 'token' with kind='rows'"),
        (
            lambda: RMMConfig(kind="wta", norm_estimator="token", overrides={"query": {"kind": "rows"}}),
            ValueError,
            r"overrides\['query'\]: norm_estimator is for",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()

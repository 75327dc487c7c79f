"""Running means: what they learn, what they never learn, and that they wait for no device."""

import math

import pytest
import torch
from estimator_helpers import CPU, call_of
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rmm_linear.estimators import LayerCall, RunningNorms, SampleCache, make_norm_estimator
from rmm_linear.sketches import TokenMask


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

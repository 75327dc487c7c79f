"""The sample cache: examples recalled wherever they come again, within its bytes."""

import pytest
import torch
from estimator_helpers import call_of

from rmm_linear.estimators import SampleCache


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

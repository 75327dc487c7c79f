"""Philox 4x32-10 against the known answers of its authors, an implementation in Python integers, and Triton's code."""

import math
import random

import pytest
import torch

from rmm_linear.sketches import philox as module
from rmm_linear.sketches.philox import normal, philox, philox4x32, signs, uniform, unpack_signs

MASK = 0xFFFFFFFF


def reference(key, counter):
    """Salmon et al. 2011, in Python integers: key (k0, k1), counter (c0, c1, c2, c3)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


KNOWN = [  # the kat_vectors file of Random123, philox4x32 with 10 rounds: key, counter, words
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK, MASK), (MASK,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(low, high):
    """Two 32-bit words as one int64 value."""
    value = high << 32 | low
    return value - (1 << 64) if value >= 1 << 63 else value


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_known_answers(key, counter, words):
    assert reference(key, counter) == words
    counters = [torch.tensor([c]) for c in counter]
    assert tuple(int(w) for w in philox4x32(torch.tensor(signed(*key)), *counters)) == words


def test_random_seeds_offsets_and_streams_equal_the_reference():
    draw = random.Random(1)
    for _ in range(50):
        seed, stream = draw.randrange(-(1 << 63), 1 << 63), draw.randrange(1 << 32)
        offsets = [draw.randrange(-(1 << 63), 1 << 63) for _ in range(3)] + [draw.randrange(1 << 20)]
        words = torch.stack(philox(torch.tensor([seed]), torch.tensor(offsets), stream), dim=1)
        key = (seed & MASK, seed >> 32 & MASK)
        expected = [reference(key, (offset & MASK, offset >> 32 & MASK, stream, 0)) for offset in offsets]
        assert [tuple(row) for row in words.tolist()] == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 32, -(1 << 63), (1 << 63) - 1])
def test_edge_seeds(seed):
    offsets = [0, 1, -1, MASK, 1 << 32, (1 << 32) + 1, (1 << 63) - 1]
    words = torch.stack(philox(torch.tensor(seed), torch.tensor(offsets)), dim=1)
    key = (seed & MASK, seed >> 32 & MASK)
    assert [tuple(row) for row in words.tolist()] == [reference(key, (o & MASK, o >> 32 & MASK, 0, 0)) for o in offsets]


def test_chunks_do_not_show(monkeypatch):
    offset = torch.arange(70).view(7, 10)
    whole = philox(torch.tensor(5), offset, 2)
    monkeypatch.setattr(module, "_CHUNK", 16)
    for chunked, word in zip(philox(torch.tensor(5), offset, 2), whole, strict=True):
        assert torch.equal(chunked, word)


def as_float32(number):
    return torch.tensor(number, dtype=torch.float64).to(torch.float32).item()


@pytest.mark.parametrize("word", [0, 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 0x6627E8D5, 0x9B00DBD8])
def test_uniform_is_tritons_formula(word):
    """uint_to_uniform_float: the word as int32, −x − 1 where negative, converted and scaled in float32."""
    x = word - 2**32 if word >= 2**31 else word
    x = -x - 1 if x < 0 else x
    expected = as_float32(as_float32(x) * as_float32(4.6566127342e-10))
    assert uniform(torch.tensor([word])).item() == expected
    assert 0 <= expected < 1


def test_normal_is_box_muller_and_finite():
    words = philox(torch.tensor(3), torch.arange(50_000))
    numbers = torch.cat(normal(words[0], words[1])).double()
    # Moments 1 to 4 of 100,000 standard normal numbers, at z = 4: their variances are 1, 2, 15 and 96.
    for power, mean, var in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(numbers.pow(power).mean().item() - mean) < 4 * math.sqrt(var / len(numbers))
    first, second = normal(torch.tensor([0]), torch.tensor([2**30]))  # u = 0 is held at 1e-7, the angle is π
    assert first.item() == pytest.approx(-math.sqrt(-2 * math.log(1e-7)) * -math.cos(math.pi), rel=1e-5)
    assert abs(second.item()) < 1e-2


def test_signs_are_the_bits_of_the_words():
    words = philox(torch.tensor(11), torch.arange(3), 4)[0].tolist()
    expected = [-1 if words[i // 32] >> (i % 32) & 1 else 1 for i in range(70)]
    assert signs(torch.tensor(11), 70, 4).tolist() == expected
    assert unpack_signs(torch.tensor([0b101]))[0, :4].tolist() == [-1, 1, -1, 1]


def test_signs_are_fair_and_independent():
    drawn = torch.stack([signs(torch.tensor(seed), 64) for seed in range(1_000)]).double()
    # 64 means and 2,016 pair products of 1,000 fair signs; the largest of 2,080 normal numbers stays below 5.
    products = (drawn.T @ drawn) / math.sqrt(1_000)
    assert products.triu(1).abs().max() < 5
    assert drawn.sum(0).abs().max() / math.sqrt(1_000) < 5

"""Seeds that kernels write themselves: the results are those of seeds that are in their place."""

import sys

import pytest
import torch

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)

from rmm_kernels_checks import Inputs

from rmm_linear.backends.triton import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# As a kernel gets them: of 32 bits, beyond them, and the first and the last of 64.
SEEDS = [5, -7, 2**31 - 1, 2**31, -(2**31) - 1, 2**40 + 3, 2**63 - 1, -(2**63)]
SINGLE = torch.float32


# Each of a matrix and seeds, two of them where two matrices are packed.
CALLS = {
    "pack": lambda make, x, seed: make.pack(x, 3, seed),
    "encode_normal": lambda make, x, seed: make.encode_normal(x, 1.6, seed),
    "random_keys": lambda make, x, seed: [make.random_keys(seed, len(x))],
    "countsketch": lambda make, x, seed: [make.sparse_sketch(x, seed, 4)],
    "packed countsketch": lambda make, x, seed: make.sparse_sketch(x, seed, 4, bits=4),
    "rademacher": lambda make, x, seed: make.dense_sketch(x, seed, "rademacher", len(x) or 1, 4, bits=4),
    "pack_norm": lambda make, x, seed: make.pack_norm(x, 4, seed, 1e-5),
    "normalize_and_pack": lambda make, x, seed: make.normalize_and_pack(x, None, None, (SINGLE, SINGLE), 4, seed, 1e-5),
    "square_and_pack": lambda make, x, seed: make.square_and_pack(x, 4, seed),
    "pack_gated": lambda make, x, seed: sum(make.pack_gated(x, x, seed, "silu", 4), ()),
    "gate_and_pack": lambda make, x, seed: sum(make.gate_and_pack(x, x, seed, "silu", 4)[1], ()),
}


def numbers(name, seed):
    return (seed, 3 - seed if seed > 0 else 3) if "gate" in name else (seed,)


@pytest.mark.parametrize(
    "name",  # those that make an output too, which takes longest, hand the seed on as those that only pack
    [
        pytest.param(name, marks=[pytest.mark.thorough] * name.endswith(("gate_and_pack", "normalize_and_pack")))
        for name in CALLS
    ],
)
def test_a_seed_by_value_gives_what_the_same_one_in_its_place_gives(name):
    x, make, results = Inputs(DEVICE).matrix(19, 70), kernels(), []
    for place, seed in enumerate(SEEDS):
        given = numbers(name, seed)
        expected = CALLS[name](make, x, torch.tensor(given, device=DEVICE))
        room = place % 2  # what fills the place up
        around = torch.full((len(given) + room + 2,), 9, device=DEVICE)
        found = CALLS[name](make, x, (around[1:-1], given))
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.equal(one, other)
        assert around.tolist() == [9, *given, *[given[-1]] * room, 9]
        results.append(b"".join(one.cpu().numpy().tobytes() for one in found if one is not None))
    assert len(set(results)) == len(SEEDS)


@pytest.mark.parametrize("name", CALLS)
def test_a_seed_of_nothing_is_written_too(name):
    place, given = torch.zeros(3, dtype=torch.int64, device=DEVICE), numbers(name, -8)
    CALLS[name](kernels(), torch.ones(0 if name == "random_keys" else 5, 0, device=DEVICE), (place, given))
    assert place.tolist() == [*given, *[given[-1]] * (3 - len(given))]

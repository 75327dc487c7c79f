"""Seeds: new for every step, layer and rank, and reproducible with torch.manual_seed.

Seeds come from torch's global CPU generator, so whatever restores that generator (torch.manual_seed, a Trainer that
resumes) restores the sketches. The rank is hashed in, because set_seed gives all ranks the same seed and
averaging equal sketches over ranks would not lower the noise.
"""

from __future__ import annotations

import functools
import hashlib
import struct

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_LIMIT = 2**63 - 1


def mix(*parts: int) -> int:
    """Hash integers into one signed 64-bit seed.

    Example:
        >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
        (True, False)
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw_seed() -> int:
    """Draw a seed from the global CPU generator, advancing it."""
    return mix(_value(torch.randint(_LIMIT, (), device="cpu")), _rank())


def peek_seed() -> int:
    """Return the seed that :func:`draw_seed` would return now, without advancing the global generator."""
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    return mix(_value(torch.randint(_LIMIT, (), generator=copy, device="cpu")), _rank())


def seed_on(device: torch.device, seed: int | None) -> Tensor:
    """Return a seed as a tensor, int64, shape (1,). While a graph is captured, every replay has another."""
    seeds = torch.full((1,), draw_seed() if seed is None else seed, dtype=torch.int64, device=device)
    _vary(seeds)
    return seeds


def fill_seed(seeds: Tensor, seed: int | None) -> None:
    """Write what :func:`seed_on` returns into a tensor of shape (1,), and into what fills it up."""
    seed, whole = draw_seed() if seed is None else seed, _filled_up(seeds)
    if whole.is_cpu:  # as the C library writes it
        whole[1:].zero_()
        whole = seeds
    whole.fill_(seed)  # one launch on a device
    _vary(seeds)


def fill_seeds(seeds: Tensor, seed: int | None) -> None:
    """Write the seeds, int64 (n,), of several matrices that are packed together, whose errors must be independent.

    What fills them up becomes 0, or in eager code on a device the seed.
    """
    count, whole = len(seeds), _filled_up(seeds)
    if seed is None or seeds.is_cpu or is_capturing(seeds.device) or torch._C._len_torch_dispatch_stack():
        whole[count:].zero_()
        for i, one in enumerate(seeds_of(seed, count)):
            seeds[i].fill_(one)
    else:  # one launch
        torch.bitwise_xor(_numbers_on(seeds.device, count, len(whole)), seed, out=whole)
    _vary(seeds)


def _filled_up(seeds: Tensor) -> Tensor:
    """Return seeds with the 8 bytes that fill them up to a multiple of 16, where they are a part of stored bytes."""
    count, begin = len(seeds), seeds.storage_offset()
    even = count + count % 2
    has_room = (begin + even) * seeds.itemsize <= seeds.untyped_storage().nbytes()
    return seeds.as_strided((even,), (1,)) if has_room else seeds


@functools.cache
def _numbers_on(device: torch.device, count: int, size: int) -> Tensor:
    """Return numbers on a device, which is waited for once; not for a graph that records, whose memory it would be."""
    with torch.inference_mode(False):
        return torch.tensor([*_numbers(count), *[0] * (size - count)], device=device)


def seeds_of(seed: int | None, count: int) -> list[int]:
    """Return the seeds that follow from one; None draws it."""
    seed = draw_seed() if seed is None else seed
    return [seed ^ number for number in _numbers(count)]


@functools.cache
def _numbers(count: int) -> list[int]:
    return [mix(-1, i) for i in range(count)]


def is_capturing(device: torch.device) -> bool:
    """Say whether a CUDA graph is being captured, while nothing may be read from the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _vary(seeds: Tensor) -> None:
    """While a graph is captured: a Python number would be the same in every replay, a random number is not."""
    if is_capturing(seeds.device):
        seeds ^= torch.randint(2**63 - 1, seeds.shape, device=seeds.device)


def _value(drawn: Tensor) -> int:
    """Return the number; 0 in a step that is simulated, whose tensors have no values."""
    return 0 if isinstance(drawn, FakeTensor) else int(drawn)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0

"""Seeds: new for every step, layer and rank, and reproducible with torch.manual_seed.

Seeds come from torch's global CPU generator, so whatever restores that generator (torch.manual_seed, a Trainer that
resumes) restores the sketches. The rank is hashed in, because set_seed gives all ranks the same seed and
averaging equal sketches over ranks would not lower the noise.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_LIMIT = 2**63 - 1


def mix(*parts: int) -> int:
    """Hash integers into one signed 64-bit seed."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw_seed() -> int:
    """Draw a seed from the global CPU generator, advancing it."""
    return mix(_value(torch.randint(_LIMIT, (), device="cpu")), _rank())


def peek_seed(rank: int | None = None) -> int:
    """Return the seed that :func:`draw_seed` would return now, without advancing the global generator.

    ``rank``: That of another process, which the seed would be drawn in.
    """
    copy = torch.Generator()
    copy.set_state(torch.get_rng_state())
    return mix(_value(torch.randint(_LIMIT, (), generator=copy, device="cpu")), _rank() if rank is None else rank)


class Fresh(NamedTuple):
    """Seeds that are not in their place yet: a kernel writes them as it begins, so that no launch does that alone."""

    place: Tensor  # int64, (n,), and what fills it up, which the last seed is written to
    values: tuple[int, ...]  # the n seeds


def fresh_seed(place: Tensor, seed: int | None) -> Tensor | Fresh:
    """Return a seed for a place of shape (1,), which may be a part of stored bytes; None draws it.

    While a graph is captured, it is written, and changed by a random number of the device: a Python number would be the
    same in every replay.
    """
    return _fresh(place, (draw_seed() if seed is None else seed,))


def fresh_seeds(place: Tensor, seed: int | None) -> Tensor | Fresh:
    """Return the seeds of several matrices that are packed together, whose errors must be independent."""
    return _fresh(place, tuple(seeds_of(seed, len(place))))


def _fresh(place: Tensor, values: tuple[int, ...]) -> Tensor | Fresh:
    whole = _filled_up(place)
    if whole.is_cpu and whole is not place:  # as the C library writes it
        whole[len(values) :].zero_()
        whole = place
    made = Fresh(whole, values)
    if not is_capturing(place.device):
        return made
    seeds = written(made)
    return seeds.bitwise_xor_(torch.randint(2**63 - 1, seeds.shape, device=seeds.device))


def written(seeds: Any) -> Any:
    """Write seeds that are not in their place yet, with PyTorch, and return it; return anything else as it is."""
    if type(seeds) is not Fresh:
        return seeds
    for i, value in enumerate(seeds.values):
        seeds.place[i:].fill_(value)
    return place_of(seeds)


def place_of(seeds: Tensor | Fresh) -> Tensor:
    """Return the place of seeds, shape (n,): after a kernel has written them, or where they were before."""
    return seeds.place[: len(seeds.values)] if isinstance(seeds, Fresh) else seeds


def each_of(seeds: Tensor | Fresh) -> list[Tensor] | list[Fresh]:
    """Return every seed alone."""
    if isinstance(seeds, Tensor):
        return list(seeds.split(1))
    count, places = len(seeds.values), range(len(seeds.values))
    return [Fresh(seeds.place[i : i + 1 if i + 1 < count else None], seeds.values[i : i + 1]) for i in places]


def _filled_up(seeds: Tensor) -> Tensor:
    """Return seeds with the 8 bytes that fill them up to a multiple of 16, where they are a part of stored bytes."""
    count, begin = len(seeds), seeds.storage_offset()
    has_room = count % 2 and (begin + count + 1) * seeds.itemsize <= seeds.untyped_storage().nbytes()
    return seeds.as_strided((count + 1,), (1,)) if has_room else seeds


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


def is_simulated() -> bool:
    """Say whether a step is simulated, whose tensors have no values."""
    return isinstance(torch.empty(()), FakeTensor)


def _value(drawn: Tensor) -> int:
    """Return the number; 0 in a step that is simulated, whose tensors have no values."""
    return 0 if isinstance(drawn, FakeTensor) else int(drawn)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0

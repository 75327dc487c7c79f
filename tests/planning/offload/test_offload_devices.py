"""Offloaded blocks on accelerators, and what a processor can test of that."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from offload_helpers import (
    SAVED,
    TOKENS,
    WIDE,
    Deep,
    Transformer,
    detach,
    offloaded,
    same,
    step,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear.memory.peak import peak
from rmm_linear.planning.offload import copies as offload_copies
from rmm_linear.planning.offload import pack as offload_pack
from rmm_linear.planning.offload.chain import OffloadChain, Offloaded
from rmm_linear.planning.offload.copies import PinnedArena, PinnedCopy
from rmm_linear.planning.step.step import run_step
from rmm_linear.planning.stores import transfers


def test_fake_memory_of_an_accelerator_lives_until_it_is_copied() -> None:
    """The copies of one block are on their way while the next one runs; then their memory is free."""
    with FakeTensorMode(), torch.no_grad():
        chain, living = OffloadChain(), []
        for _ in range(4):
            call = chain.enter()
            packer = offload_pack.Packer(nn.Module(), chain.takes_from, call.save)
            storage = (tensor := torch.empty(512, 64, device="cuda")).untyped_storage()
            living.append((weakref.ref(storage), packer(tensor)))
            del storage, tensor, packer
            chain.leave(call)
    assert [storage() is not None for storage, _ in living] == [False, False, True, True]


def place_of(tensor: Tensor) -> tuple[Any, int, int]:
    """The bytes of a contiguous tensor, which do not keep its memory."""
    return weakref.ref(tensor.untyped_storage()), tensor.storage_offset() * tensor.itemsize, tensor.nbytes


def living(place: tuple[Any, int, int]) -> Tensor | None:
    storage, offset, size = place[0](), *place[1:]
    return None if storage is None else torch.tensor([], dtype=torch.uint8).set_(storage)[offset : offset + size]


class LazyStream:
    """A stream of copies that does nothing before it is waited for, and then finds what is still there."""

    def __init__(self) -> None:
        self.queue: list[tuple[Any, Any]] = []
        self.done, self.lost, self.inside = 0, 0, False

    def wait_stream(self, _: Any) -> None:
        pass

    def record_event(self) -> int:
        return len(self.queue)

    def wait_event(self, event: int) -> None:
        for target, source in self.queue[self.done : event]:
            to, from_ = map(living, (target, source))
            if to is None or from_ is None:
                self.lost += 1
            else:
                to.numpy()[:] = from_.numpy()
        self.done = max(self.done, event)

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *_: object) -> None:
        self.inside = False


class Streamed(OffloadChain):
    """Takes the CPU's memory for an accelerator's."""

    def __init__(self, arena: PinnedArena) -> None:
        super().__init__()
        self.arena = arena

    def takes(self, device: torch.device) -> bool:
        return True

    def copy(self, content: Tensor) -> Any:
        return PinnedCopy(content, self.arena)


def test_the_computation_waits_for_copies_and_memory_lives_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, copy_ = LazyStream(), Tensor.copy_

    def lazy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not stream.inside:
            return copy_(target, source, non_blocking)
        stream.queue.append((place_of(target), place_of(source)))
        return target

    pinned: list[Tensor] = []

    def pin(size: int) -> Tensor:
        pinned.append(torch.empty(size, dtype=torch.uint8))
        return pinned[-1]

    monkeypatch.setattr(offload_copies, "side_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: stream)
    monkeypatch.setattr(Tensor, "copy_", lazy)
    # What comes back last of a block is unpacked twice, and first.
    model, count = nn.Sequential(*(block[:-1] for block in Deep(5))), SAVED - 1
    chain = Streamed(PinnedArena(pin))
    parameters = [*model.parameters()]
    expected = torch.autograd.grad(model(WIDE).square().sum(), parameters)
    for block in model:
        Offloaded(block, chain).attach()
    loss = model(WIDE).square().sum()
    assert (len(stream.queue), stream.done) == (5 * count, 3 * count)  # the last two blocks' are under way
    for _ in range(3):
        assert same(torch.autograd.grad(loss, parameters, retain_graph=True), expected)
    # Back come three blocks in the first backward pass, and all in those after it.
    assert len(stream.queue) == (5 + 3 + 5 + 5) * count
    last = torch.autograd.grad(loss, parameters[-1:], retain_graph=True)  # and what it fetches ahead
    assert same(last, expected[-1:])
    assert stream.done == len(stream.queue)
    for _ in range(3):
        del loss
        loss = model(WIDE).square().sum()
    assert same(torch.autograd.grad(loss, parameters), expected)
    assert stream.lost == 0
    assert len(pinned) == 1  # in all of these passes


def test_an_arena_is_pinned_by_the_first_step_and_taken_again_by_later_ones() -> None:
    asked: list[int] = []
    arena = PinnedArena(lambda size: (asked.append(size), torch.empty(size, dtype=torch.uint8, device="meta"))[1])
    sizes = [3 << 20, 100, 40 << 20, 40 << 20, 300 << 20, 700, 90 << 20, 1 << 20]
    blocks = [arena.take(size) for size in sizes]
    assert [len(block) for block, _ in blocks] == sizes
    assert asked == [64 << 20, 64 << 20, 512 << 20]
    assert all(size & (size - 1) == 0 for size in asked)  # PyTorch rounds up to a power of two
    for order in (reversed, lambda found: found[1::2] + found[::2]):
        for _, give_back in order(blocks):
            give_back()
        blocks = [arena.take(size) for size in sizes]
    for _, give_back in blocks:
        give_back()
    arena.take((512 << 20) - 100)  # of a segment that is whole again
    assert sum(asked) == arena.bytes == (64 + 64 + 512) << 20
    arena.take(2000 << 20)  # what is larger than any segment has one of its own
    assert asked[-1] == 2048 << 20


def test_blocks_of_an_arena_share_no_byte() -> None:
    arena, generator, taken = PinnedArena(lambda size: torch.zeros(size, dtype=torch.uint8)), random.Random(0), []
    for number in range(400):
        if taken and generator.random() < 0.5:
            block, value, give_back = taken.pop(generator.randrange(len(taken)))
            assert (block == value).all()
            give_back()
        else:
            block, give_back = arena.take(generator.randrange(1, 200_000))
            taken.append((block.fill_(number % 251), number % 251, give_back))
    assert all((block == value).all() for block, value, _ in taken)
    assert arena.bytes == 64 << 20


def test_where_the_system_pins_no_more_blocks_are_pageable_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty, left = torch.empty, [1]

    def make(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory and not left:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        left[:] = left[pin_memory:]
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", make)
    transfers._say_pageable.cache_clear()
    arena, blocks = PinnedArena(), []
    for _ in range(4):
        blocks.append(arena.take(40 << 20))
    assert [len(block) for block, _ in blocks] == [40 << 20] * 4
    assert arena.bytes == 64 << 20
    assert transfers.host_memory((3, 5), torch.bfloat16).shape == (3, 5)
    (said,) = caplog.messages
    assert said.startswith("The system pins no more host memory (CUDA error: out of memory), so copies go to pageable")
    for _, give_back in blocks:
        give_back()
    assert arena.take(64 << 20)[0].untyped_storage().nbytes() == 64 << 20  # what was pinned is used still


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("chosen", [slice(None), slice(0, None, 2)])
def test_gradients_on_an_accelerator(p: float, chosen: slice, device: torch.device) -> None:
    """Two steps, so that the second one finds pinned and device memory that the first has used."""
    model, tokens = Transformer(p, width=256).to(device), TOKENS.to(device)
    with torch.random.fork_rng([device]):
        expected = step(model, tokens)
        attached = offloaded([*model.blocks[chosen]], None)
        for _ in range(2):
            for a, b in zip(step(model, tokens), expected, strict=True):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))  # some kernels add atomically
    detach(attached)


@pytest.mark.gpu
def test_products_on_an_accelerator_to_the_bit(device: torch.device) -> None:
    model, x = Deep(8, 3, 1024).to(device), torch.randn(4096, 1024, device=device)
    expected = step(model, x)
    attached = offloaded([*model], None)
    for _ in range(3):
        assert same(step(model, x), expected)
    loss = model(x).sum()
    plain = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    assert same(torch.autograd.grad(loss, [*model.parameters()]), plain)
    del loss, plain
    model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    for _ in range(5):  # graphs that are dropped
        loss = model(x).sum()
        torch.autograd.grad(loss, [*model[3].parameters()], retain_graph=True)  # and what it fetched ahead
        del loss
    assert torch.cuda.memory_allocated() == before
    detach(attached)


@pytest.mark.gpu
def test_the_peak_on_an_accelerator_is_bounded_and_repeats(device: torch.device) -> None:
    model, x = Deep(12, 4, 1024).to(device), torch.randn(8192, 1024, device=device)  # 32 MiB
    size = x.numel() * x.element_size()

    def measured() -> int:
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with peak(device) as found:
            run_step(model, x)
        return found.bytes - before

    plain = measured()
    attached = offloaded([*model], None)
    measured()
    found = [measured() for _ in range(3)]
    parameters = sum(4 * parameter.numel() for parameter in model.parameters())
    assert len(set(found)) == 1
    assert found[0] <= parameters + 16 * size  # three blocks of five at most, and one
    assert plain >= found[0] + 20 * size
    detach(attached)

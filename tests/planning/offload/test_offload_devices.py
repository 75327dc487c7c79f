"""Offloaded blocks on accelerators, and what a processor can test of that."""

from __future__ import annotations

import gc
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
from rmm_linear.planning.offload.copies import PinnedCopy
from rmm_linear.planning.step.step import run_step


def test_fake_memory_of_an_accelerator_lives_until_it_is_copied() -> None:
    """The copies of one block are on their way while the next one runs; then their memory is free."""
    with FakeTensorMode(), torch.no_grad():
        chain, living = OffloadChain(), []
        for _ in range(4):
            call = chain.enter()
            packer = offload_pack.Packer(nn.Module(), chain.takes, call.save)
            storage = (tensor := torch.empty(512, 64, device="cuda")).untyped_storage()
            living.append((weakref.ref(storage), packer(tensor)))
            del storage, tensor, packer
            chain.leave(call)
    assert [storage() is not None for storage, _ in living] == [False, False, True, True]


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
            to, from_ = (torch.tensor([], dtype=torch.uint8).set_(end()) if end() else None for end in (target, source))
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

    def takes(self, device: torch.device) -> bool:
        return True

    def copy(self, content: Tensor) -> Any:
        return PinnedCopy(content)


def test_the_computation_waits_for_copies_and_memory_lives_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, empty, copy_ = LazyStream(), torch.empty, Tensor.copy_

    def lazy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not stream.inside:
            return copy_(target, source, non_blocking)
        stream.queue.append((weakref.ref(target.untyped_storage()), weakref.ref(source.untyped_storage())))
        return target

    pinned = []  # the allocator of pinned memory waits for copies itself

    def make(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*args, **options)
        pinned.extend([made] * pin_memory)
        return made

    monkeypatch.setattr(offload_copies, "side_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: stream)
    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(Tensor, "copy_", lazy)
    # What comes back last of a block is unpacked twice, and first.
    model, chain, count = nn.Sequential(*(block[:-1] for block in Deep(5))), Streamed(), SAVED - 1
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

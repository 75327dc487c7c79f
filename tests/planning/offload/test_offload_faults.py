"""Offloaded blocks: nothing is left of graphs, files and processes, and errors say what they should."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_helpers import full_disk, in_a_child
from offload_helpers import (
    SAVED,
    TOKENS,
    WIDE,
    Deep,
    Transformer,
    detach,
    files,
    measured_now,
    offloaded,
    same,
    step,
)
from torch import Tensor, nn

from rmm_linear.memory.peak import peak
from rmm_linear.planning import StoreError
from rmm_linear.planning.offload.chain import OffloadChain, Offloaded


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    gc.collect()
    assert list(tmp_path.rglob("*")) == []


def test_a_graph_that_is_dropped_takes_all_with_it(tmp_path: Path) -> None:
    model = Deep(3)
    attached = offloaded([*model], tmp_path)
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(storage := WIDE.clone().untyped_storage())
        output = model(torch.empty(0).set_(storage, 0, WIDE.shape))
        del storage
        assert len(files(tmp_path)) == 3 * SAVED
        assert kept() is None  # it is in a file
        del output
        assert files(tmp_path) == []
    finally:
        gc.enable()
    detach(attached)


def test_memory_is_free_without_a_collection(tmp_path: Path) -> None:
    """Also of tensors that stay: a hook that returned them with their graph would make a cycle."""
    model = Deep(2)
    attached = offloaded([*model], tmp_path)
    step(model, WIDE)
    gc.collect()
    gc.disable()
    try:
        for example in (WIDE, WIDE[:8]):
            with peak("cpu") as measured:
                loss = model(example).sum()
                del loss
                assert measured_now(measured) == 0
    finally:
        gc.enable()
    detach(attached)


def test_an_error_in_the_backward_pass_leaves_nothing(tmp_path: Path) -> None:
    model = Deep(4)
    expected = step(model, WIDE)
    attached = offloaded([*model], tmp_path)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("here")

    with peak("cpu") as measured:
        half: Any = model[1](model[0](WIDE))
        half.register_hook(fail)
        loss = model[3](model[2](half)).sum()
        with pytest.raises(ArithmeticError):
            loss.backward()
        assert files(tmp_path)
        del half, loss
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert measured_now(measured) == 0
    assert files(tmp_path) == []
    assert same(step(model, WIDE), expected)
    detach(attached)


def test_without_gradients_nothing_is_done(tmp_path: Path) -> None:
    model = Deep(2)
    expected = model(WIDE)
    attached = offloaded([*model], tmp_path / "not-there")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(model(WIDE), expected)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(WIDE)
    assert not (tmp_path / "not-there").exists()
    detach(attached)


@pytest.mark.parametrize("large", [True, False])
def test_a_change_in_place_is_the_error_that_it_is(large: bool, tmp_path: Path) -> None:
    x = (WIDE if large else WIDE[:2].clone()).clone().requires_grad_()
    model = nn.Sequential(nn.Tanh(), nn.ReLU(inplace=True))
    message = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    attached = offloaded([model], tmp_path)
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    detach(attached)
    attached = offloaded([model[0]], tmp_path)  # changed after the block has ended
    with pytest.raises(RuntimeError, match=message):
        model(x).sum().backward()
    detach(attached)
    gc.collect()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "cannot be read: No such file"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is damaged: .*ends early"),
        (lambda path: os.truncate(path, 3), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x77"), "is damaged: its digest is another"),
        (lambda path: path.write_bytes(files(path.parent.parent)[1].read_bytes()), "is damaged"),
    ],
)
def test_a_damaged_file_is_named(damage: Any, message: str, tmp_path: Path) -> None:
    model = Deep(3)
    expected = step(model, WIDE)
    attached = offloaded([*model], tmp_path)
    loss = model(WIDE).square().sum()
    damage(files(tmp_path)[0])
    with pytest.raises(StoreError, match=rf"offload-00000000\.safetensors {message}"):
        loss.backward()
    del loss
    assert same(step(model, WIDE), expected)
    detach(attached)


def test_a_full_disk(tmp_path: Path) -> None:
    model = Deep(3)
    expected = step(model, WIDE)
    attached = offloaded([*model], tmp_path)
    with full_disk(4096), pytest.raises(StoreError, match=r"offload-00000000\.safetensors cannot be written: File too"):
        model(WIDE)
    assert files(tmp_path) == []
    assert same(step(model, WIDE), expected)
    detach(attached)


def test_the_cpu_needs_a_folder() -> None:
    block = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"the CPU's memory is where it would go\. Give folder="):
        Offloaded(block, OffloadChain()).attach()
    assert "forward" not in block.__dict__
    assert block(torch.ones(2)).shape == (2,)


def test_copies_of_the_model_are_offloaded_too(tmp_path: Path) -> None:
    model = Transformer(0.2)
    expected = step(model)
    attached = offloaded([*model.blocks], tmp_path)
    loss = model(TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other_chains = {id(block.forward.chain) for block in other.blocks}
        assert len(other_chains) == 1
        assert other_chains != {id(model.blocks[0].forward.chain)}
        assert other.blocks[0].forward.module is other.blocks[0]
        assert same(step(other), expected)
        assert len(list(tmp_path.glob("rmm-*.lock"))) > 1
    del other
    gc.collect()
    loss.backward()
    del loss
    detach(attached)


def test_a_forked_process_leaves_the_files_and_says_why_it_cannot_read_them(tmp_path: Path) -> None:
    model = Deep(2)
    expected = step(model, WIDE)
    attached = offloaded([*model], tmp_path)
    model.zero_grad(set_to_none=True)
    kept = [model(WIDE).square().sum()]

    def child() -> int:
        with pytest.raises(StoreError, match="another process"):
            torch.autograd.grad(kept[0], [*model.parameters()], retain_graph=True)
        right = same(step(model, WIDE), expected)
        kept.clear()
        attached[0].chain._files.store.close()  # pyright: ignore[reportOptionalMemberAccess]
        gc.collect()
        return 0 if right else 1

    assert in_a_child(child) == 0
    assert len(files(tmp_path)) == 2 * SAVED
    kept.pop().backward()
    detach(attached)


def test_a_process_that_ends_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from rmm_linear.planning.offload.chain import OffloadChain, Offloaded\n"
        "block = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))\n"
        "Offloaded(block, OffloadChain(sys.argv[1])).attach()\n"
        "output = block(torch.ones(512, 64))\n"
        "import pathlib\n"
        "assert len([*pathlib.Path(sys.argv[1]).glob('rmm-*/*')]) == 2\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 3

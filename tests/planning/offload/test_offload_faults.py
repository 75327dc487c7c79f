"""Faults of files and of steps, whatever else a block does: a clear error, nothing left, a right next step."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composed_helpers import example, gradients, model_of, plan
from fault_helpers import at_write, full_disk, in_a_child, no_room
from offload_helpers import files, same
from torch import Tensor, nn

import rmm_linear
from rmm_linear.planning import StoreError

LAYERS = 3
CHOICES = ["offload", "recompute + offload", "attention + offload", "selective + offload", "nested + offload"]


class Trial:
    """A model with a plan, and what its steps must come to."""

    def __init__(self, choice: str, folder: Path) -> None:
        self.model, self.folder = model_of(LAYERS), folder
        self.expected = gradients(self.model)
        made = plan(self.model, choice, str(folder))
        if choice.startswith("nested"):
            made = replace(made, blocks=[replace(row, inner=(f"{row.name}.mlp",)) for row in made.blocks])
        made.apply(self.model)
        self.model.zero_grad()

    def loss(self) -> Tensor:
        torch.manual_seed(1)
        return self.model(example()).square().mean()

    def is_right(self) -> bool:
        """Say whether the next steps are those of the plain model, and leave no file."""
        gc.collect()
        found = [gradients(self.model) for _ in range(2)]
        return all(same(one, self.expected) for one in found) and files(self.folder) == []


@pytest.fixture(params=CHOICES)
def trial(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trial]:
    one = Trial(request.param, tmp_path)
    yield one
    rmm_linear.revert(one.model)
    assert all("forward" not in vars(module) for module in one.model.modules())
    assert same(gradients(one.model), one.expected)
    del one
    gc.collect()
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "cannot be read: No such file"),
        (lambda path: path.write_bytes(files(path.parent.parent)[1].read_bytes()), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "is damaged"),
    ],
    ids=["gone", "another", "short"],
)
def test_a_damaged_file_is_named(damage: Callable[[Path], Any], message: str, trial: Trial) -> None:
    loss = trial.loss()
    damage(files(trial.folder)[0])
    with pytest.raises(StoreError, match=rf"offload-00000000\.safetensors {message}"):
        loss.backward()
    del loss
    assert trial.is_right()


def test_a_full_disk(trial: Trial) -> None:
    with full_disk(4096), pytest.raises(StoreError, match=r"offload-00000000\.safetensors cannot be written: File too"):
        trial.loss()
    assert files(trial.folder) == []
    assert trial.is_right()


@pytest.mark.parametrize("fault", ["no room", "interrupt"])
def test_a_write_that_fails_in_the_middle_of_a_forward_pass(
    fault: str, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    error: type[BaseException] = StoreError if fault == "no room" else KeyboardInterrupt
    with monkeypatch.context() as patch:
        at_write(patch, 1, no_room if fault == "no room" else interrupt)
        with pytest.raises(error):
            trial.loss()
    gc.collect()
    assert files(trial.folder) == []
    assert trial.is_right()


def test_a_folder_that_is_removed_between_the_passes(trial: Trial) -> None:
    loss = trial.loss()
    (own,) = trial.folder.glob("rmm-*/")
    shutil.rmtree(own)
    with pytest.raises(StoreError, match=r"offload-\d+\.safetensors cannot be read: No such file"):
        loss.backward()
    del loss
    assert trial.is_right()


def test_a_folder_that_is_removed_with_the_one_it_is_in(trial: Trial) -> None:
    loss = trial.loss()
    shutil.rmtree(trial.folder)
    with pytest.raises(StoreError, match="cannot be read: No such file"):
        loss.backward()
    del loss
    assert trial.is_right()


def test_a_forked_process_leaves_the_files_and_says_why_it_cannot_read_them(trial: Trial) -> None:
    kept = [trial.loss()]
    before = files(trial.folder)
    assert len(before) >= LAYERS

    def child() -> int:
        torch.set_num_threads(1)
        with pytest.raises(StoreError, match="another process"):
            torch.autograd.grad(kept[0], [*trial.model.parameters()], retain_graph=True)
        right = all(same(gradients(trial.model), trial.expected) for _ in range(2))
        kept.clear()
        trial.model.layers[0].forward.chain._files.store.close()
        gc.collect()
        return 0 if right else 1

    assert in_a_child(child) == 0
    assert files(trial.folder) == before
    kept.pop().backward()
    assert same(
        [parameter.grad for parameter in trial.model.parameters() if parameter.grad is not None], trial.expected
    )
    assert trial.is_right()


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, LAYERS], ids=["forward", "backward"])
def test_a_step_that_ends_in_the_middle(call: int, error: type[BaseException], trial: Trial) -> None:
    """In the forward pass of the second block, or while it is recomputed or its gradient is made."""
    seen = [0]

    def fail(*_: Any) -> None:
        seen[0] += 1
        if seen[0] == 1:
            raise error

    module: nn.Module = trial.model.layers[1].mlp[1]
    if call == 1:
        handle = module.register_forward_hook(fail)
        with pytest.raises(error):
            trial.loss()
        gc.collect()
        assert files(trial.folder) == []
    else:  # PyTorch keeps nodes that were next in its queue until the next backward pass
        loss = trial.loss()
        assert files(trial.folder)
        handle = module.weight.register_hook(fail)
        with pytest.raises(error):
            loss.backward()
        del loss
    handle.remove()
    assert trial.is_right()

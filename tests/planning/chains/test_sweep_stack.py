"""Sweeps inside of what trains models: distributed data parallel, optimizers, an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planning_helpers import plain
from torch import Tensor, nn

from rmm_linear.planning import SweepReport, sweep


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Solver(nn.Module):
    """A model whose forward pass is a chain."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head, self.options = nn.Linear(4, 4), nn.Linear(4, 1), options

    def advance(self, number: int, u: Tensor) -> Tensor:
        return torch.tanh(self.cell(u))

    def forward(self, u: Tensor) -> Tensor:
        chain = sweep(self.advance, u, 12, **self.options) if self.options else plain(self.advance, u, 12)
        return self.head(chain)


def losses(trained: nn.Module) -> list[float]:
    """Losses of a training run of five steps."""
    optimizer, found = torch.optim.SGD(trained.parameters(), lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = trained(torch.ones(3, 4)).square().sum()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_training_under_distributed_data_parallel(group: None, tmp_path: Path) -> None:
    """Its hooks see every parameter once, or the second step fails; a method of a module finds the module's own."""
    exact, swept = Solver(), Solver(slots=3, store=tmp_path / "store", interval=4)
    expected = losses(exact)
    found = losses(nn.parallel.DistributedDataParallel(swept))
    assert found == expected
    assert expected[-1] < 0.5 * expected[0]


@pytest.mark.gpu
@pytest.mark.parametrize("store", ["cpu", "folder"])
def test_on_an_accelerator(store: str, tmp_path: Path) -> None:
    """States go through pinned memory on a stream of their own, and the device's generator repeats."""
    device, report = torch.device("cuda"), SweepReport()
    place: Any = tmp_path / "store" if store == "folder" else store
    torch.manual_seed(0)
    cell, u = nn.Linear(256, 256, device=device), torch.randn(512, 256, device=device, requires_grad=True)

    def step(number: int, u: Tensor) -> Tensor:
        return torch.tanh(cell(nn.functional.dropout(u, 0.1)))

    def gradients(run: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        return torch.autograd.grad(run().square().sum(), [u, *cell.parameters()])

    expected = gradients(lambda: plain(step, u, 60))
    for interval in (5, "auto"):
        options = {"slots": 3, "store": place, "interval": interval, "report": report}
        with device:  # as under torch.set_default_device
            found = gradients(lambda options=options: sweep(step, u, 60, **options))
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))

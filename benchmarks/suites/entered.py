"""Count the modules of the library that a call enters.

What a newcomer must open to follow a call: the files whose functions run, their lines, and how often the call moves
from one file to another. By sys.setprofile, after some steps, so that what is decided once is not counted.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.library import table
from benchmarks.suites.models import build
from rmm_linear import RMMConfig, convert


def entered(run: Callable[[], object]) -> tuple[list[str], int]:
    """Run something, and return the modules of the library that it entered, sorted, and the moves between them."""
    found, last, moves = set[str](), "", 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal last, moves
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.partition(".")[0] == "rmm_linear":
            found.add(name)
            moves += name != last
            last = name

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return sorted(found), moves


class _Model(nn.Module):
    """Two layers: the call of the second is looked at, without what a call of the model does once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.found = nn.Linear(16, 16), nn.Linear(16, 16), None

    def forward(self, x: Tensor) -> Tensor:
        x, outputs = self.first(x).detach(), list[Tensor]()
        self.found = entered(lambda: outputs.append(self.second(x)))
        return outputs[0]


def _linear(bits: int | None) -> tuple[_Model, Tensor]:
    torch.manual_seed(0)
    model = _Model()
    how: dict[str, Any] = {"ratio": 0.1} if bits is None else {"memory": 0.1}
    convert(model, RMMConfig(kind="countsketch", bits=bits, min_rows=1, **how))
    return model, torch.randn(64, 16, requires_grad=True)


def _roberta() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = build("Roberta", "ForSequenceClassification", vocab_size=64, **sizes).train()
    ids = torch.randint(3, 60, (8, 32))
    mask = torch.ones_like(ids)
    mask[4:, 20:] = 0
    return model, {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(8, dtype=torch.long)}


def counts() -> list[tuple[str, list[str], int]]:
    """Return what is done, the modules that it enters, and the moves between them."""
    rows = []
    for title, bits in (("16 bits", None), ("4 bits", 4)):
        model, x = _linear(bits)
        for _ in range(12):
            model(x).sum().backward()
        output = model(x)
        rows.append((f"linear layer in a model, {title}, forward", *(model.found or ([], 0))))
        rows.append((f"linear layer in a model, {title}, backward", *entered(lambda o=output: o.sum().backward())))
    model, batch = _roberta()
    step, moves = entered(lambda: (convert(model, RMMConfig(min_rows=1)), model(**batch).loss.backward()))
    rows.append(("RoBERTa, all operations, convert and one step", step, moves))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> Iterator[str]:
    lines = []
    for what, names, moves in counts():
        length = sum(len(inspect.getsource(sys.modules[name]).splitlines()) for name in names)
        lines.append((what, str(len(names)), f"{length:,}", str(moves)))
    yield table(("", "modules", "lines", "moves"), lines)

"""What users do with a step comes to the same with tiles: what the other executors that run something again keep to."""

from __future__ import annotations

import functools

import pytest
import replay_cases as cases
import torch
from replay_parts import Part
from tile_helpers import error
from torch import nn

from rmm_linear.planning.tiles.tile import Tile

STEPS = {
    "twice": cases.twice,
    "on a copy": cases.on_a_copy,
    "without its gradient": cases.without_its_gradient,
    "retained": cases.retained,
    "first forward, first back": cases.two_at_once,
    "last forward, first back": functools.partial(cases.two_at_once, reverse=True),
    "checkpoint": cases.in_a_checkpoint,
    "reentrant checkpoint": functools.partial(cases.in_a_checkpoint, reentrant=True),
    "autocast": cases.under_autocast,
    "autocast without its cache": functools.partial(cases.under_autocast, cached=False),
    "autocast and the same weights without tiles": cases.beside_a_plain_run,
    "failed forward": cases.failed_forward,
    "failed repetition": cases.failed_repetition,
}


def prepare(blocks, folder):
    for block in blocks:
        for part in (block.first, block.second):
            Tile(part, 512).attach()
    return nn.Sequential(*blocks)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, monkeypatch):
    monkeypatch.setitem(cases.EXECUTORS, "tiles", prepare)
    found, expected = (
        STEPS[name](trial) + trial.seen() for trial in (cases.Trial.of(Part, "stack", one) for one in ("tiles", ""))
    )
    assert [one is None for one in found] == [one is None for one in expected]
    limit = 2e-2 if "autocast" in name else 1e-5
    pairs = [(one, other) for one, other in zip(found, expected, strict=True) if one is not None]
    assert all(
        error(one, other) < limit if one.is_floating_point() else torch.equal(one, other) for one, other in pairs
    )


@pytest.mark.parametrize("change", [cases.replace_weight, lambda trial: trial.x.mul_(2)])
def test_changes_between_passes_are_errors(change, monkeypatch):
    monkeypatch.setitem(cases.EXECUTORS, "tiles", prepare)
    with pytest.raises(RuntimeError, match=r"was replaced|changed in place|modified by an inplace operation"):
        cases.then(change)(cases.Trial.of(Part, "stack", "tiles"))

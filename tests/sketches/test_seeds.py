"""The seeds of what is packed together."""

import torch

from rmm_linear.sketches.seeds import fresh_seeds, written


def filled(seed):
    seeds = torch.zeros(3, dtype=torch.int64)
    written(fresh_seeds(seeds, seed))
    return seeds.tolist()


def test_seeds_differ_and_follow_from_one():
    assert len({*filled(5), *filled(6)}) == 6
    assert filled(5) == filled(5)
    torch.manual_seed(1)
    drawn = filled(None)
    assert drawn != filled(None)
    torch.manual_seed(1)
    assert drawn == filled(None)


def test_every_replay_of_a_graph_has_its_own(monkeypatch):
    monkeypatch.setattr("rmm_linear.sketches.seeds.is_capturing", lambda device: True)
    assert len({*filled(5), *filled(5)}) == 6

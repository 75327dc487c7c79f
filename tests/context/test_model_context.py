"""Seeds of a converted model: fresh everywhere and reproducible."""

import pytest
import torch
from cases import ROUGH
from helpers import Mlp, checkpointed, seeds_of, six_features
from torch import nn

from rmm_linear import convert
from rmm_linear.sketches.seeds import draw_seed, mix, peek_seed

# Fresh


def test_every_layer_step_and_model_has_its_own_seed():
    """A generator made again for each layer would start from one seed, and all would share one S."""
    models = [Mlp(), Mlp()]
    for model in models:
        convert(model, **ROUGH).context.checks.is_done = True  # no step shows that ReLU keeps the second layer's input
    seeds = seeds_of(lambda: [model(torch.ones(40, 12)) for model in models for _ in range(5)])
    assert len(set(seeds)) == len(seeds) == 20


def test_a_layer_that_is_used_twice_in_a_step_has_two_seeds():
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU())  # which does not keep its output
    model.append(model[0])
    convert(model, **ROUGH)
    seeds = seeds_of(lambda: [model(six_features()).sum().backward() for _ in range(3)])
    assert len(set(seeds)) == len(seeds) == 6


def test_mix_depends_on_every_part_and_their_order():
    parts = [(1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), (-1, 2), (1 << 62, 2)]
    mixed = [mix(*p) for p in parts]
    assert len(set(mixed)) == len(parts)
    assert all(-(1 << 63) <= m < 1 << 63 for m in mixed)


def test_peek_is_the_next_draw_and_moves_nothing():
    torch.manual_seed(8)
    state = torch.get_rng_state()
    peeked = peek_seed()
    assert torch.equal(torch.get_rng_state(), state)
    assert draw_seed() == peeked
    assert draw_seed() != peeked


class Recursive(torch.nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x, depth=2):
        x = self.layer(x)
        return self(x, depth - 1) if depth else x


def test_a_module_that_calls_itself_has_a_seed_for_every_call():
    model = Recursive()
    convert(model, **ROUGH)
    torch.manual_seed(2)
    first = seeds_of(lambda: model(six_features()))
    assert len(set(first)) == 3
    assert len(set(seeds_of(lambda: model(six_features()))) | set(first)) == 6
    torch.manual_seed(2)
    assert seeds_of(lambda: model(six_features())) == first


def raise_interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_pass_that_does_not_end_is_forgotten(error):
    """By an error, or by Ctrl-C in a notebook: PyTorch runs no hook after it."""
    model = checkpointed()
    convert(model, **ROUGH)
    handle = model.dropout.register_forward_hook(raise_interrupt if error is KeyboardInterrupt else lambda *_: None)
    with pytest.raises(error):
        model(six_features() if error is KeyboardInterrupt else torch.ones(3, 5))
    handle.remove()
    torch.manual_seed(2)
    first = seeds_of(lambda: [model(six_features()) for _ in range(2)])
    torch.manual_seed(2)
    assert seeds_of(lambda: [model(six_features()) for _ in range(2)]) == first
    assert len(set(first)) == 6


# Reproducible


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_same_seed_same_run_to_the_bit(dropout):
    """Also for the second run of one process, on the same model object."""

    def run(seed):
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(seed)
        losses = []
        for _ in range(4):
            loss = model(six_features()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    model = checkpointed(dropout=dropout)
    convert(model, **ROUGH)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    (losses, first), (again, second), (_, other) = run(1), run(1), run(2)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_restored_generator_state_continues_the_run():
    """As a Trainer does that resumes from a checkpoint."""
    model = checkpointed()
    convert(model, **ROUGH)
    torch.manual_seed(1)
    model(six_features()).sum().backward()
    state = torch.get_rng_state()
    expected = seeds_of(lambda: model(six_features()))
    twin = checkpointed()
    convert(twin, **ROUGH)
    torch.set_rng_state(state)
    assert seeds_of(lambda: twin(six_features())) == expected


def test_reseeding_reproduces_a_submodule_that_is_called_by_itself():
    model = checkpointed(dropout=0.0)
    convert(model, **ROUGH)
    runs = []
    for _ in range(2):
        model(six_features())
        torch.manual_seed(3)
        runs.append(seeds_of(lambda: [model.block(six_features()) for _ in range(2)]))
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


def test_a_part_that_is_called_by_itself_is_named_once(caplog):
    """As where a container was converted and its training step calls a module inside."""
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))}).train()
    convert(model, min_rows=1)
    with torch.no_grad():
        model["net"](torch.randn(100, 32))
    assert not caplog.messages
    for _ in range(2):
        model["net"](torch.randn(100, 32)).sum().backward()
    assert sum("net.0 is trained outside of a forward pass" in one for one in caplog.messages) == 1
    assert sum("Convert the module that the training loop calls." in one for one in caplog.messages) == 1

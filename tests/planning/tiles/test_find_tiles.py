"""Position-wise modules are found by what they compute; what mixes positions is refused, without values too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model
from peft_helpers import lora
from tile_helpers import WIDTH, Block, Gated, Stack
from torch import Tensor, nn

from rmm_linear import convert, revert
from rmm_linear.planning.blocks.recompute import Recomputed
from rmm_linear.planning.tiles.apply import tiles_of
from rmm_linear.planning.tiles.find import find_tiles


class _Adapter(nn.Module):
    """Linear layers, and beside them a convolution over positions, whose result is scaled."""

    def __init__(self, scale, kernel=3):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.mix = nn.Conv1d(16, 16, kernel, padding="same", groups=16)
        self.scale = nn.Parameter(torch.full((8,), scale))

    def forward(self, x):
        mixed = self.mix(self.down(x).transpose(1, 2)).transpose(1, 2)
        return self.base(x) + self.scale * self.up(mixed.relu())


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0])
def test_what_has_no_effect_yet_is_found(scale):
    """A gate or a last layer of zeros hides what it scales until it is trained."""
    module = _Adapter(scale)
    before = [one.clone() for one in module.parameters()]
    assert "other positions" in find_tiles(module).refused[""]
    assert find_tiles(_Adapter(scale, kernel=1)).tiles
    nn.init.zeros_(module.up.weight)
    assert "other positions" in find_tiles(module).refused[""]
    assert all(map(torch.equal, [*module.parameters()][:5], before[:5]))


class _Shifting(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.up, self.down, self.settings = nn.Linear(8, 16), nn.Linear(16, 8), settings

    def forward(self, x):
        shifts = self.settings["shift"] if isinstance(self.settings, dict) else self.settings.shift
        return self.down(self.up(x.roll(1, 1) if shifts else x).relu())


@pytest.mark.parametrize("make", [dict, SimpleNamespace])
def test_modules_are_alike_only_with_the_same_settings(make):
    settings = make(shift=False)
    assert len(find_tiles(nn.ModuleList([_Shifting(settings), _Shifting(settings)])).tiles) == 2
    assert not find_tiles(_Shifting(make(shift=True))).tiles


FOUND = {
    "roberta": {"embeddings.LayerNorm", "layer.0.feed_forward_chunk", "attention.output.LayerNorm"},
    "gpt2": {"ln_1", "ln_2", "mlp", "ln_f"},
    "llama": {"mlp", "input_layernorm", "post_attention_layernorm", "model.norm"},
    "mixtral": {"experts", "input_layernorm", "post_attention_layernorm", "model.norm"},
    "t5": {"layer.0.layer_norm", "layer.1", "layer.1.layer_norm", "layer.2", "final_layer_norm"},
    "vit": {"layernorm_before", "layernorm_after", "mlp", "vit.layernorm"},
}
ATTENTION = {"roberta": "attention.self", "gpt2": "attn", "llama": "self_attn", "mixtral": "self_attn"}
ATTENTION |= {"t5": "Attention", "vit": "attention"}


def labels(module):
    return [one.label for one in find_tiles(module).tiles]


@pytest.mark.parametrize("name", FOUND)
def test_models_of_transformers(name):
    model = tiny_model(name, layers=1)
    state, before = torch.get_rng_state(), {key: one.clone() for key, one in model.state_dict().items()}
    modes = [part.eval().training for part in model.modules()]
    found = find_tiles(model)
    assert {next(end for end in FOUND[name] if label.endswith(end)) for label in labels(model)} == FOUND[name]
    assert any(label.endswith(ATTENTION[name]) for label in found.refused)
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    on_meta = find_tiles(model.to("meta"))
    assert on_meta.tiles == found.tiles
    assert set(found.refused) - set(on_meta.refused) == set()


def test_projections_with_adapters():
    ends = {label.removeprefix("base_model.model.model.layers.0.") for label in labels(lora("llama", layers=1))}
    assert {"self_attn.q_proj", "self_attn.v_proj", "mlp", "input_layernorm"} < ends
    assert "self_attn.k_proj" not in ends


class Around(nn.Module):
    """Two linear layers, and a function between them or of what goes in."""

    def __init__(self, between, before=lambda x: x) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(self.before(x))))


class Convolved(Around):
    """With a convolution over positions."""

    def __init__(self) -> None:
        super().__init__(lambda x: self.conv(x.transpose(1, 2)).transpose(1, 2))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)


class Normed(Around):
    """With a norm over positions."""

    def __init__(self) -> None:
        super().__init__(lambda x: self.norm(x.transpose(1, 2)).transpose(1, 2))
        self.norm = nn.BatchNorm1d(WIDTH)


class Routed(Around):
    """With a router that takes eight tokens of each choice, by their order."""

    def __init__(self) -> None:
        super().__init__(self.route)

    @staticmethod
    def route(x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(x[..., :4].argmax(-1), 4)
        is_taken = (chosen.cumsum(1) * chosen).amax(-1, keepdim=True) <= 8
        return x * is_taken


def shifted(x: Tensor) -> Tensor:
    return x + nn.functional.pad(x, (0, 0, 1, -1))


def dropped(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape[0], 1, 1, device=x.device) > 0.1)


MIXING = {
    "mean": lambda: Around(lambda x: x - x.mean(1, keepdim=True)),
    "mean of a batch": lambda: Around(lambda x: x - x.mean(0, keepdim=True)),
    "softmax": lambda: Around(lambda x: x.softmax(1)),
    "shift": lambda: Around(shifted),
    "order": lambda: Around(lambda x: x.cumsum(1)),
    "places": lambda: Around(lambda x: x + torch.arange(x.shape[1], device=x.device).unsqueeze(-1)),
    "norm": Normed,
    "convolution": Convolved,
    "capacity": Routed,
    "dropped paths": lambda: Around(dropped),
    "in place": lambda: Around(lambda x: x, lambda x: x.add_(1)),
    "first": lambda: Around(lambda x: x[:, 0]),
    "many rows": lambda: Around(lambda x: x - x.mean(1, keepdim=True) if x.shape[1] > 4096 else x),
    "scores": lambda: Around(lambda x: x @ x.transpose(1, 2) @ x),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MIXING)
def test_what_is_refused(name, device):
    module = MIXING[name]().to(device)
    found = find_tiles(module)
    assert found.tiles == []
    assert found.refused.keys() == {""}
    assert len(found.refused[""]) > 10


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_not_worth_it_and_what_is(device):
    parts = {
        "linear": nn.Linear(WIDTH, WIDTH),
        "embedding": nn.Embedding(9, WIDTH),
        "relu": nn.ReLU(),
        "prelu": nn.PReLU(WIDTH),
        "batch": nn.BatchNorm1d(WIDTH),
        "norm": nn.RMSNorm(WIDTH),
        "norms": nn.LayerNorm([4, WIDTH]),
        "mlp": nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 5)),
        "wide": nn.Sequential(nn.LayerNorm(WIDTH), Gated(), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH)),
    }
    model = nn.ModuleDict(parts).to(device)
    assert labels(model) == ["norm", "mlp", "wide"]


def test_a_module_of_other_inputs_is_reported():
    class Strict(Around):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] != 3:
                raise ValueError("three sequences")
            return super().forward(x)

    assert find_tiles(Strict(lambda x: x)).refused == {"": "it cannot be tried on rows alone (three sequences)"}


def test_several_inputs_and_half_types():
    class Residual(Around):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return super().forward(x) + residual

    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert labels(Residual(torch.relu).to(dtype)) == [""]
        assert labels(Around(lambda x: x - x.mean(1, keepdim=True)).to(dtype)) == []


def test_layers_of_torch_and_their_method():
    found = find_tiles(nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True))
    assert [(one.label, one.parts) for one in found.tiles[:1]] == [
        ("_ff_block", ("linear1", "dropout", "linear2", "dropout2"))
    ]
    assert [one.label for one in found.tiles[1:]] == ["norm1", "norm2"]


def test_tiles_of_a_block_again_and_again():
    block, calls = Block(), 0
    block.mlp.register_forward_hook(lambda *_: pytest.fail("hooks of others run"))

    class Counted(Gated):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    block.mlp = Counted()
    first = tiles_of(block, 64)
    assert calls > 0
    assert [one.module for one in first] == [block.norm, block.mlp]
    calls = 0
    for one in first:
        one.attach()
    planned = Recomputed(block)
    planned.attach()
    again = tiles_of(block, 64)
    assert [(one.module, one.method) for one in again] == [(one.module, one.method) for one in first]
    planned.detach()
    for one in first:
        one.detach()
    assert calls == 0
    assert all("forward" not in vars(part) for part in block.modules())
    assert [one.name for one in find_tiles(block.norm).tiles] == [""]


def test_converted_models_are_searched_as_exact_ones_are():
    model = Stack(1)
    expected = labels(model)
    convert(model)
    context = model.blocks[0].mlp.up.rmm_context
    before = {name: len(getattr(context, name)) for name in ("seeded_alone", "learned", "directions")}
    assert labels(model) == expected == ["blocks.0.norm", "blocks.0.mlp"]
    assert {name: len(getattr(context, name)) for name in before} == before
    revert(model)

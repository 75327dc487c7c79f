"""Checkpoints of converted and unconverted models are the same; the conversion is saved with them and found again."""

import copy
import json
import pickle
import random

import helpers
import pytest
import torch
from cases import EXACT, ROUGH_BODY, architectures
from helpers import Mlp, gradients, tiny_model, token_ids
from state_helpers import learned
from torch import nn

from rmm_linear import RMMConfig, convert, sketch_state
from rmm_linear.integrations.pretrained import convert_as_saved, save_conversion


def step(model, optimizer=None, architecture="roberta"):
    found = helpers.step(model, architecture, seed=3)
    if optimizer is not None:
        optimizer.step()
    return found


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@architectures
@pytest.mark.parametrize("converted_first", [True, False], ids=["from converted", "to converted"])
def test_pretrained_folders_go_both_ways(tmp_path, architecture, converted_first):
    source = tiny_model(architecture, dropout=0.0)
    if converted_first:
        convert(source, **ROUGH_BODY)
    source.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded, info = type(source).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(loaded.state_dict(), source.state_dict())
    if not converted_first:
        convert(loaded, **ROUGH_BODY)
    first, second = (step(model.train(), architecture=architecture) for model in (loaded, source))
    assert torch.equal(first[0], second[0])
    assert first[1].keys() == second[1].keys()


def test_state_dicts_in_torch_files_go_both_ways(tmp_path):
    plain, converted = tiny_model("llama"), tiny_model("llama", dropout=0.0)
    convert(converted, **ROUGH_BODY)
    torch.save(converted.state_dict(), tmp_path / "converted.pt")
    plain.load_state_dict(torch.load(tmp_path / "converted.pt", weights_only=True))  # tensors alone, no class of ours
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    converted.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    assert same(plain.state_dict(), converted.state_dict())


def test_optimizers_go_both_ways():
    """The state of one trains on in the other: with the same gradients, at ratio 1, they end alike."""
    first, second = tiny_model("roberta", dropout=0.0).train(), tiny_model("roberta", dropout=0.0).train()
    one, two = (torch.optim.AdamW(model.parameters(), lr=0.01) for model in (first, second))
    convert(first, **EXACT)
    step(first, one)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # which shares its tensors
    for _ in range(2):
        assert torch.equal(step(first, one)[0], step(second, two)[0])
    one = torch.optim.AdamW(first.parameters(), lr=0.01)
    one.load_state_dict(copy.deepcopy(two.state_dict()))
    for _ in range(2):  # the second loss is that of a step with the moments
        assert torch.equal(step(first, one)[0], step(second, two)[0])


@architectures
def test_an_optimizer_from_before_the_conversion_trains_on(architecture):
    """Every parameter moves by the learning rate, as Adam's first step does, and none that was replaced stays."""
    model = tiny_model(architecture, dropout=0.0).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-16)  # gradients of queries are near 1e-8
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    report = convert(model, **ROUGH_BODY)
    found = step(model, optimizer, architecture)[1]
    for name in report.converted:
        moved = before[f"{name}.weight"] - model.get_parameter(f"{name}.weight")
        gradient = found[f"{name}.weight"]
        large = gradient.abs() > 1e-12
        assert large.any(), name
        assert torch.allclose(moved[large], 0.01 * gradient[large].sign(), rtol=0.02), name


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@architectures
def test_copies_of_a_converted_model_sketch_on_their_own(architecture, clone):
    model = tiny_model(architecture, dropout=0.1).train()
    convert(model, **ROUGH_BODY)
    step(model, architecture=architecture)
    twin = clone(model)
    before = gradients(model)
    loss, found = step(twin, architecture=architecture)
    assert same(gradients(model), before)
    again, expected = step(model, architecture=architecture)
    assert torch.equal(loss, again)
    assert same(found, expected)
    layers = [module for module in twin.modules() if hasattr(module, "rmm_context")]
    assert len({id(layer.rmm_context) for layer in layers}) == 1
    assert layers[0].rmm_context is not next(m for m in model.modules() if hasattr(m, "rmm_context")).rmm_context


# The conversion, next to the weights


def test_a_conversion_is_found_again(tmp_path):
    config = RMMConfig(
        memory=0.5, min_rows=8, exclude_modules=["classifier.dense"], overrides={"output.dense": {"memory": 0.8}}
    )
    model = tiny_model("roberta", dropout=0.0).train()
    report = convert(model, config)
    step(model)
    model.save_pretrained(tmp_path)
    save_conversion(model, tmp_path)
    saved = json.loads((tmp_path / "rmm_config.json").read_text())
    assert RMMConfig.from_dict(saved) == config

    loaded = type(model).from_pretrained(tmp_path).train()
    found = convert_as_saved(loaded, tmp_path)
    assert found.converted == report.converted
    assert sketch_state(loaded) == sketch_state(model)
    assert same(step(loaded)[1], step(model)[1])  # the same sketches from the same seed


def test_parts_that_were_converted_by_themselves_are_not_saved_as_the_whole(tmp_path):
    model = tiny_model("llama")
    convert(model.model.layers[0])
    with pytest.raises(ValueError, match=r"got one with model.layers.0.self_attn, which was converted by itself"):
        save_conversion(model, tmp_path)
    save_conversion(model.model.layers[0], tmp_path)


def test_layers_that_an_example_left_out_stay_left_out(tmp_path):
    model = tiny_model("roberta", dropout=0.0).train()
    fields = {
        **ROUGH_BODY,
        "overrides": {"intermediate.dense": {"ratio": 0.5}, "attention.output.dense": {"ratio": 0.3}},
    }
    report = convert(model, example={"input_ids": token_ids()}, **fields)
    save_conversion(model, tmp_path)
    found = convert_as_saved(tiny_model("roberta"), tmp_path)
    assert report.skipped
    assert [(name, layer.config.ratio) for name, layer in found.converted.items()] == [
        (name, layer.config.ratio) for name, layer in report.converted.items()
    ]


def test_what_is_not_converted_has_nothing_to_save(tmp_path):
    with pytest.raises(ValueError, match=r"Call rmm_linear\.convert first"):
        save_conversion(Mlp(), tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"must have a conversion, .* save_conversion\(model, folder\) writes it"
    ):
        convert_as_saved(Mlp(), tmp_path)
    (tmp_path / "sketch_state.json").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match=r"It has the state of sketches alone .* as checkpoints of a Trainer do"
    ):
        convert_as_saved(Mlp(), tmp_path)


FILES = ["rmm_config.json", "tensors"]


def saved_file(folder, name):
    (tensors,) = folder.glob("rmm_config.json.*.safetensors")
    return tensors if name == "tensors" else folder / name


def is_refused(folder):
    """Whether a model is left as it was, by an error that names a file; otherwise it is converted and trains."""
    model, refusal = Mlp(), None
    try:
        convert_as_saved(model, folder)
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        model(torch.randn(4, 10, 12)).square().sum().backward()
        return False
    assert "rmm_config.json" in refusal
    assert all(type(module) is nn.Linear for module in (model.first, model.second))
    assert not model._forward_hooks
    return True


@pytest.mark.parametrize("name", FILES)
def test_any_damage_is_refused_or_harmless(tmp_path, name):
    """Truncated anywhere, or with one byte that is another one or gone."""
    save_conversion(learned(), tmp_path)
    path = saved_file(tmp_path, name)
    whole, generator, refused = path.read_bytes(), random.Random(1), []
    for case in range(60):
        place = generator.randrange(len(whole))
        other = (whole[place] + generator.randrange(1, 256)) % 256
        rest = (b"", bytes([other]) + whole[place + 1 :], whole[place + 1 :])[case % 3]
        path.write_bytes(whole[:place] + rest)
        refused.append(is_refused(tmp_path))
    assert sum(refused) > 30
    if name == "tensors":
        assert all(refused)  # its digest is known


def test_a_conversion_of_other_layers_is_refused_by_name(tmp_path):
    save_conversion(learned(target_modules=["first"]), tmp_path)
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"cannot be converted by .*rmm_config.json: target_modules must match"):
        convert_as_saved(model, tmp_path)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    "damage",
    [
        *("", "[]", "[" * 100_000, '{"a":' * 100_000, "\0" * 100, '{"ratio": NaN}'),
        *({"sketch_state": []}, {"sketch_state": {"layers": 3}}),
    ],
    ids=lambda damage: str(damage)[:20],
)
def test_files_of_another_form_are_refused(tmp_path, damage):
    save_conversion(learned(), tmp_path)
    path = tmp_path / "rmm_config.json"
    path.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(path.read_text()) | damage))
    assert is_refused(tmp_path)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return self.fc(x.exp())  # which saves the input of fc


class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(self.fc(x * 2) + x)


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["plain", "wrapped"])
def test_a_chosen_layer_whose_name_ends_that_of_another_is_chosen_alone(wrap, tmp_path):
    model = wrap(Outer())
    report = convert(model, example=torch.randn(200, 32))
    assert len(report.converted) == 1
    save_conversion(model, tmp_path)
    assert list(convert_as_saved(Outer(), tmp_path).converted) == ["fc"]

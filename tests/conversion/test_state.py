"""What norm estimators have learned, in files: whole, damaged, and of other models."""

import pytest
import torch
from cases import WTA
from helpers import Mlp, tiny_model, token_ids
from torch import nn

from rmm_linear import convert, load_sketch_state, read_sketch_state, save_sketch_state, sketch_state, sketch_tensors

ATTENTION = {**WTA, "target_modules": ["query", "key", "value"]}
ESTIMATORS = ["position", "token", "position_token", "sample_cache", "sequence_cache"]


def trained(name, steps=2, seed=0):
    model = tiny_model("roberta", dropout=0.0, layers=1).train()
    convert(model, norm_estimator=name, **ATTENTION)
    go_on(model, steps, seed)
    return model


def go_on(model, steps, seed):
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = token_ids()
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids[:, 0] % 2, sample_index=torch.arange(4)).loss.backward()
        optimizer.step()


def equal(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[name].nan_to_num(-1), second[name].nan_to_num(-1)) for name in first
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_run_that_is_read_goes_on_as_the_one_that_was_saved(name, tmp_path):
    """To the bit: the first step after it already draws by what was learned, together with its siblings."""
    model = trained(name)
    save_sketch_state(model, tmp_path / "state.json")
    twin = trained(name, steps=0)
    twin.load_state_dict(model.state_dict())
    read_sketch_state(twin, tmp_path / "state.json")
    assert equal(sketch_tensors(model), sketch_tensors(twin))
    assert sketch_state(model) == sketch_state(twin)
    assert sketch_state(model)["groups"] == [
        [f"roberta.encoder.layer.0.attention.self.{n}" for n in ("query", "key", "value")]
    ]
    for one in (model, twin):
        go_on(one, 1, seed=5)
    assert equal(model.state_dict(), twin.state_dict())
    fresh = trained(name, steps=0)
    fresh.load_state_dict(trained(name).state_dict())
    go_on(fresh, 1, seed=5)
    assert not equal(fresh.state_dict(), model.state_dict())


def test_parameters_buffers_and_state_dict_are_those_of_the_original_model():
    """So checkpoints are interchangeable, and distributed training has nothing to spread: each rank keeps its own."""
    plain, model = tiny_model("roberta", layers=1), trained("position_token")
    assert sketch_tensors(model)
    assert list(plain.state_dict()) == list(model.state_dict())
    assert [n for n, _ in plain.named_buffers()] == [n for n, _ in model.named_buffers()]


def test_a_model_that_has_learned_nothing_has_one_file(tmp_path):
    model = trained("position", steps=0)
    save_sketch_state(trained("position"), tmp_path / "state.json")
    save_sketch_state(model, tmp_path / "state.json")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    read_sketch_state(model, tmp_path / "state.json")
    assert sketch_tensors(model) == {}


def test_two_conversions_in_one_model_keep_their_groups_apart():
    def made(steps):
        return nn.ModuleList([trained("position", steps), trained("token", steps=0)])

    pair, other = made(2), made(0)
    assert sketch_state(pair)["groups"] == [
        [f"0.roberta.encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")]
    ]
    load_sketch_state(other, sketch_state(pair), sketch_tensors(pair))
    assert sketch_state(other) == sketch_state(pair)
    assert equal(sketch_tensors(other), sketch_tensors(pair))


def change(tensors, name, **new):
    key = next(key for key in tensors if key.endswith(name))
    tensors.pop(key)
    return {**tensors, **{key.rpartition(":")[0] + ":" + part: tensor for part, tensor in new.items()}}


@pytest.mark.parametrize(
    ("estimator", "part", "new", "message"),
    [
        ("position", "unit", {}, "unit must be two"),
        ("position", "unit", {"unit": torch.ones(3)}, "unit must be two"),
        ("position", "unit", {"unit": torch.tensor([1.0, -1.0])}, "unit must be two"),
        ("position", "position", {"position": torch.ones(3, 20)}, r"position must have the shape \(2, positions\)"),
        ("position", "position", {"position": torch.ones(2, 20).double()}, "must hold finite float32"),
        ("position", "position", {"position": torch.full((2, 20), torch.nan)}, "must hold finite float32"),
        ("position", "position", {"place": torch.ones(2, 20)}, "got place"),
        ("token", "token", {"token": torch.ones(2, 64)}, r"token must have the shape \(2, 32768\)"),
        ("sample_cache", "cache", {"cache": torch.ones(4, 20)}, "cache must be bfloat16"),
        ("sample_cache", "cache", {"cache": -torch.ones(4, 20, dtype=torch.bfloat16)}, "finite and at least 0"),
        ("sample_cache", "cache", {}, "needs the tensors unit and cache"),
        ("sequence_cache", "cache", {"cache": torch.ones(4, 20, dtype=torch.bfloat16)}, r"\(examples, 1\)"),
    ],
)
def test_tensors_that_no_estimator_writes_are_refused(estimator, part, new, message):
    """Of one layer; the others, and their estimators, are as before."""
    model = trained(estimator)
    before = {name: tensor.clone() for name, tensor in sketch_tensors(model).items()}
    with pytest.raises(ValueError, match=message):
        load_sketch_state(model, sketch_state(model), change(sketch_tensors(model), part, **new))
    assert equal(before, sketch_tensors(model))


def test_other_estimators_and_other_layers_are_refused(tmp_path):
    model = trained("position")
    save_sketch_state(model, tmp_path / "state.json")
    with pytest.raises(ValueError, match=r"same norm estimators, got 'position' for .*key, which has 'token'"):
        read_sketch_state(trained("token", steps=0), tmp_path / "state.json")
    other = Mlp()
    convert(other)
    with pytest.raises(ValueError, match="same sketched layers"):
        read_sketch_state(other, tmp_path / "state.json")
    tensors = {**sketch_tensors(model), "head:unit": torch.ones(2)}
    with pytest.raises(ValueError, match="must be of the model's norm estimators, got 'head:unit'"):
        load_sketch_state(model, sketch_state(model), tensors)
    state = sketch_state(model) | {"groups": [["head", "query"]]}
    with pytest.raises(ValueError, match="other groups"):
        load_sketch_state(model, state)

"""bits="auto" takes the quietest width, once, and a checkpoint keeps it."""

import importlib
import json
import pickle

import pytest
import torch
from helpers import Mlp, tiny_model, token_ids
from torch._subclasses.fake_tensor import FakeTensorMode

from rmm_linear import (
    RMMConfig,
    RMMLinear,
    convert,
    load_sketch_state,
    read_sketch_state,
    save_sketch_state,
    sketch_state,
)
from rmm_linear.context.auto_bits import STEPS, AutoBits, predicted_noise
from rmm_linear.context.model_context import SketchCache
from rmm_linear.memory import track_saved
from rmm_linear.packing.pack import packed_bytes
from rmm_linear.sketches import TokenMask
from rmm_linear.variance import sketch_variance


def config(memory=0.1, **fields):
    return RMMConfig(memory=memory, min_rows=1, checkpointed="packed", **fields)


def test_the_prediction_is_the_exact_noise_of_random_signs():
    torch.manual_seed(0)
    x = torch.randn(300, 70)
    y = torch.randint(0, 2, (300, 8)).float() * 2 - 1
    for bits in (8, 4, 2):
        spec = config().spec(300, 70, 4, bits)
        exact = sketch_variance(x, y, kind=spec.kind, rows=spec.rows, bits=bits) / y.square().sum()
        # Both are functions of random signs: they agree to about 1/√(300 · 8) and the mean over few S.
        assert float(predicted_noise(x, config(), 4, bits, None)) == pytest.approx(float(exact), rel=0.1)


def test_much_padding_chooses_four_bits_and_none_chooses_two():
    """77 % padding at 10 % of 16 bits: 4 bits hold every token. Without padding, more rows are quieter."""
    torch.manual_seed(0)
    x = torch.randn(1000, 128)
    mask = TokenMask.of(torch.arange(1000) < 230)

    def best(mask):
        return min((8, 4, 2), key=lambda bits: float(predicted_noise(x, config(), 2, bits, mask)))

    assert best(mask) == 4
    assert best(None) == 2


def steps(model, count, **batch):
    for _ in range(count):
        model(**batch).logits.sum().backward()


def test_a_model_settles_after_the_first_steps_and_reports_it():
    model = tiny_model("roberta", dropout=0.0).train()
    report = convert(model, config())
    batch = {"input_ids": token_ids()}
    steps(model, STEPS, **batch)
    assert report.bits == {}
    steps(model, 1, **batch)
    assert set(report.bits) == set(report.converted)
    for name, bits in report.bits.items():
        noise = model.get_submodule(name).rmm_auto_bits.noise
        assert bits == min(noise, key=noise.get)
    before = report.bits
    steps(model, 3, input_ids=token_ids(2, 30))
    assert report.bits == before
    assert json.loads(json.dumps(report.to_dict()))["bits"] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_a_fraction_of_the_inputs_own_bytes(dtype):
    for bits in (None, 8, 4, 2):
        layer = RMMLinear(192, 8, config=config(0.07, bits=bits), dtype=dtype)
        x = torch.randn(1000, 192, dtype=dtype)
        with track_saved(layer) as kept:
            layer(x)
        row = 192 * dtype.itemsize if bits is None else packed_bytes(1, 192, bits)
        assert 0.07 * x.nbytes + 8 - row < kept.total <= 0.07 * x.nbytes + 8


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_under_checkpointing_a_step_looks_once(reentrant):
    model = tiny_model("roberta", dropout=0.0).train()
    report = convert(model, config())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    steps(model, STEPS, input_ids=token_ids())
    query = model.get_submodule("roberta.encoder.layer.0.attention.self.query")
    query.rmm_auto_bits.read()
    assert query.rmm_auto_bits.steps == STEPS
    steps(model, 2, input_ids=token_ids())
    assert report.bits


def test_ratio_alone_means_the_dtype_itself_and_excludes_memory():
    assert RMMConfig(ratio=0.1).spec(1000, 64, 4).bits is None
    assert RMMConfig(memory=0.1).spec(1000, 64, 4).bits == 4  # before anything was seen
    assert RMMConfig(memory=0.1, bits=None).spec(1000, 64, 4).rows == 100
    assert RMMConfig(ratio=1, bits=8).spec(1000, 64, 4).rows == 1000
    assert RMMConfig(ratio=1).spec(1000, 64, 4) is None
    with pytest.raises(ValueError, match="ratio and memory exclude each other"):
        RMMConfig(ratio=0.1, memory=0.1)
    assert RMMConfig(memory=0.2).replace(ratio=0.1).memory is None
    assert RMMConfig(ratio=0.1).replace(memory=0.2).ratio is None


# Checkpoints


def test_the_state_comes_back(tmp_path):
    first, second = (tiny_model("roberta", dropout=0.0).train() for _ in range(2))
    for model in (first, second):
        convert(model, config())
    steps(first, STEPS + 1, input_ids=token_ids())
    save_sketch_state(first, tmp_path / "state.json")
    read_sketch_state(second, tmp_path / "state.json")
    assert sketch_state(second) == sketch_state(first)


WRONG = [
    {"bits": 3, "steps": 0, "noise": {}},
    {"bits": 8.0, "steps": 0, "noise": {}},
    {"bits": None, "steps": 9, "noise": {}},
    {"bits": None, "steps": 2, "noise": {"4": 1.0}},
    {"bits": 4, "steps": "4", "noise": {}},
    {"bits": 4, "steps": 1, "noise": {"8": 1.0, "4": 1.0, "2": "much"}},
]


def test_a_state_that_nothing_writes_is_an_error_and_changes_nothing(tmp_path):
    model, path = Mlp(), tmp_path / "state.json"
    convert(model, config())
    before = sketch_state(model)
    for text in ("", "{}", "[]", '{"layers": {"first": {}}}', '{"layers": {"other": null}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"state\.json"):
            read_sketch_state(model, path)
    for values in WRONG:
        state = sketch_state(model)
        state["layers"][next(reversed(state["layers"]))] = values
        with pytest.raises(ValueError, match="must be the result of sketch_state"):
            load_sketch_state(model, state)
    assert sketch_state(model) == before


def test_the_state_of_another_model_is_refused():
    model, other = Mlp(), Mlp()
    convert(model, config())
    convert(other, config(), target_modules=["first"])
    with pytest.raises(ValueError, match="same sketched layers, got other ones: second"):
        load_sketch_state(model, sketch_state(other))


def test_a_choice_survives_its_dictionary():
    choice = AutoBits(4, 3, {8: 1.0, 4: 0.5, 2: 2.0})
    assert AutoBits.from_dict(json.loads(json.dumps(choice.to_dict()))) == choice


def waiting(model):
    return [len(module.rmm_auto_bits.unread) for module in model.modules() if hasattr(module, "rmm_auto_bits")]


def test_passes_without_a_backward_pass_keep_no_more_predictions_than_are_needed():
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, config())
    with torch.no_grad():
        for _ in range(3 * STEPS):
            model(input_ids=token_ids())
    assert set(waiting(model)) == {STEPS}


def test_a_simulated_step_leaves_no_predictions():
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, config())
    ids = token_ids()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(input_ids=mode.from_tensor(ids))
    assert set(waiting(model)) == {0}
    steps(model, STEPS + 1, input_ids=ids)


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    model = tiny_model("roberta", dropout=0.0).train()
    report = convert(model, config())
    steps(model, STEPS, input_ids=token_ids())
    with monkeypatch.context() as patch:
        patch.setattr("rmm_linear.context.auto_bits.is_capturing", lambda device: True)
        model(input_ids=token_ids()).logits.sum().backward()
    assert report.bits == {}
    steps(model, 1, input_ids=token_ids())
    assert report.bits


def test_a_model_that_an_earlier_version_has_pickled_trains(tmp_path):
    """It has no list of predictions, another plan of a linear layer, and names a file that is no more."""
    model = tiny_model("roberta", dropout=0.0).train()
    convert(model, config())
    steps(model, 1, input_ids=token_ids())
    for module in model.modules():
        own = vars(module)
        own.pop("rmm_hides", None)
        if "rmm_plan" in own:
            own["rmm_plan"] = (("what", "decided"), None)
    copied = pickle.loads(pickle.dumps(model))
    for module in copied.modules():
        if hasattr(module, "rmm_auto_bits"):
            state = module.rmm_auto_bits.__getstate__()
            del state["unread"]
            module.rmm_auto_bits.__setstate__(state)
    steps(copied, STEPS, input_ids=token_ids())
    assert importlib.import_module("rmm_linear.context.sketch_cache").SketchCache is SketchCache

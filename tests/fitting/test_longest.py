"""The longest sequences: within the budget by a real step, and by how much; what binds; on the meta device."""

import json
import re

import pytest
import torch
from fit_cases import assert_untouched, network, snapshot
from helpers import tiny_model, token_ids
from planning_graph_helpers import real_peak
from torch import nn

import rmm_linear
from rmm_linear.fitting import search
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.planning.step.resize import lengthened, resized
from rmm_linear.planning.step.watch import watch as planning_watch


def llama(layers=1):
    model = tiny_model("llama", dropout=0.0, layers=layers).train()  # with dropout, attention on a CPU is quadratic
    model.config.use_cache = False
    ids = token_ids(1, 10)
    return model, {"input_ids": ids, "labels": ids}


def on_meta(layers=1):
    """A model without weights, and a batch of ten tokens."""
    model, example = llama(layers)
    return model.to("meta"), {name: tensor.to("meta") for name, tensor in example.items()}


def test_the_longest_sequence_fits_and_a_longer_exact_one_does_not():
    model, example = llama()
    before = snapshot(model)
    found = rmm_linear.max_length(model, example, "600KB", batch_size=2, allow=("keep", "recompute"), multiple=4)
    assert_untouched(model, before)
    assert 0 < found.exact <= found.checkpointed <= found.length
    assert found.tokens == 2 * found.length
    static, pair = static_memory(model).before_step, resized(example, 2)
    for length, fits in ((found.exact, True), (found.exact + 4, False)):
        assert (static + real_peak(model, lengthened(pair, length)) <= found.memory) is fits
    found.plan.apply()
    assert static + real_peak(model, lengthened(pair, found.length)) == found.peak <= found.memory
    longer = static + real_peak(model, lengthened(pair, found.length + 4))
    assert longer > found.memory
    assert longer - found.peak == pytest.approx(8 * found.bytes_per_token, rel=0.15)
    what, _, moment = found.binds.partition(", in the ")
    assert what == "the device's memory"
    assert moment.split()[0] in ("forward", "backward")


@pytest.mark.thorough  # a largest batch of compressed blocks runs real steps too
def test_compressed_blocks_of_a_real_model_run_real_steps():
    model, example = llama()
    found = rmm_linear.max_length(model, example, "250KB", allow=("keep", "pack"), max_noise=1e9, multiple=4)
    found.plan.apply()
    assert any(block.choice == "convert" for block in found.plan.blocks)
    peak = static_memory(model).before_step + real_peak(model, lengthened(resized(example, 1), found.length))
    assert peak == found.peak <= found.memory


def test_positions_bind_where_a_table_has_no_more():
    model, example = network("roberta")
    found = rmm_linear.max_length(model, example, "1GB", multiple=4)
    assert (found.length, found.exact, found.binds) == (36, 36, "positions")
    assert all(block.choice == "keep" for block in found.plan.blocks)
    assert "What binds: positions." in str(found)
    with pytest.raises(ValueError, match="multiple must be at most half of the model's 38 positions, got 20"):
        rmm_linear.max_length(model, example, "1GB", multiple=20)


@pytest.fixture(scope="module")
def million():
    """The longest sequence of more than a million tokens, and the steps that were simulated."""
    simulated = []

    def watch(*args, **named):
        simulated.append(args)
        return planning_watch(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "watch", watch)
        model, example = on_meta(layers=2)
        found = rmm_linear.max_length(
            model, example, "2GB", optimizer=torch.optim.AdamW, allow=("keep", "recompute", "pack")
        )
    return found, len(simulated)


@pytest.mark.thorough
def test_a_million_tokens_take_few_steps_on_the_meta_device(million):
    """A line from two lengths leads so near that two or three steps of each kind are enough."""
    found, simulated = million
    assert found.length % 64 == 0
    assert found.length > 10**6 > found.exact
    assert found.length > found.checkpointed > found.exact
    assert simulated <= 8
    assert 0.99 * found.memory < found.peak <= found.memory
    assert found.bytes_per_token == pytest.approx(found.peak / found.length, rel=0.01)  # beside which weights are small
    assert any("The model's configuration has 40 positions" in note for note in found.notes)


def test_what_is_printed_and_written(million):
    found, _ = million
    lines = str(found).splitlines()
    sizes = f"length={found.length} exact={found.exact} checkpointed={found.checkpointed}"
    assert re.fullmatch(rf"rmm_linear max_length: {sizes} budget=2\.0\d* GB \(1\.8\d* GiB\)", lines[0])
    assert max(map(len, lines)) <= 100
    written = json.loads(json.dumps(found.to_dict()))
    assert {"tokens", "bytes_per_token", "binds", "host_bytes", "plan"} <= written.keys()
    assert written["plan"]["blocks"]


def test_a_budget_below_the_parameters_has_no_sequence():
    model, example = llama()
    found = rmm_linear.max_length(model, example, 1000, optimizer=torch.optim.SGD)
    assert (found.length, found.exact, found.checkpointed, found.plan) == (0, 0, 0, None)
    assert found.binds == "optimizer step"
    assert found.peak > found.memory
    assert found.to_dict()["plan"] is None


@pytest.mark.parametrize(
    ("named", "error", "text"),
    [
        ({"memory": 0.5}, TypeError, "A share has no meaning here"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"multiple": 1.5}, TypeError, "multiple must be a positive integer"),
        ({"example": torch.ones(4, 8)}, ValueError, "must have sequences"),
        ({"example": lambda: 1}, ValueError, "a function as the example does not allow"),
    ],
)
def test_what_is_refused(named, error, text):
    given = {"example": torch.ones(1, 4, 8), "memory": "1MB", **named}
    with pytest.raises(error, match=text):
        rmm_linear.max_length(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), given.pop("example"), **given)

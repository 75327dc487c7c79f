"""fit: the budget is kept, what is said is what is measured, and only what is allowed is done."""

import json
import logging

import pytest
import torch
from fit_cases import Normed, rows, stack, tokens
from helpers import tiny_model
from planning_graph_helpers import real_peak
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification

import rmm_linear
from rmm_linear import fit
from rmm_linear.fitting.noise import BlockNoise, Noise, measure_noise
from rmm_linear.fitting.settings import SETTINGS, Conversions, converting
from rmm_linear.fitting.times import Times
from rmm_linear.memory import peak
from rmm_linear.planning import BlockPlan, PlannedBlock, load_plan, measure
from rmm_linear.planning.step.step import run_step
from rmm_linear.variance import gradient_noise

LAYERS = 3


def encoder(dropout=0.1):
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=256,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return RobertaForSequenceClassification(config).train()


def batch_of(sequences=8, length=64):
    ids = torch.randint(5, 200, (sequences, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(sequences) % 2}


def static_bytes(model):
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("share", [pytest.param(0.7, marks=pytest.mark.thorough), 0.45])
@pytest.mark.parametrize("max_noise", [1e9, pytest.param(1e-9, marks=pytest.mark.thorough)])
def test_the_budget_is_kept_and_what_is_said_is_measured(share, max_noise):
    model, example = encoder(), batch_of()
    allow = ("keep", "sketch", "pack") if max_noise > 1 else ("keep", "recompute", "sketch", "pack")
    report = fit(model, example, memory=share, max_noise=max_noise, allow=allow)
    assert report.fits
    assert real_peak(model, example) + static_bytes(model) <= report.memory == int(share * report.exact_peak)
    again = encoder()  # of which the first step is measured, as fit does it: later ones may take less
    BlockPlan(report.plan.blocks, config=report.plan.config).apply(again)
    measured = real_peak(again, example) + static_bytes(again)
    assert report.measured_peak == measured
    assert abs(report.predicted_peak / measured - 1) < 0.03
    assert abs(report.simulated_peak / measured - 1) < 0.03
    assert (report.noise > 0) == (max_noise > 1)
    assert report.time > 0
    assert model.rmm_plan is report.plan


def test_a_model_that_fits_stays_as_it_is(caplog):
    model, example = encoder(), batch_of()
    kinds = {name: type(module) for name, module in model.named_modules()}
    with caplog.at_level(logging.INFO, logger="rmm_linear"):
        report = fit(model, example, memory="8GB")
    assert report.is_exact
    assert report.fits
    assert report.noise == 0
    assert report.predicted_peak == report.simulated_peak == report.measured_peak == report.exact_peak
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert "The exact model fits the budget: no block is changed" in str(report)
    assert [record.getMessage() for record in caplog.records] == [report.summary()]
    rmm_linear.revert(model)


def test_what_cannot_be_met_is_said_with_what_would_help():
    model, example = stack(3).train(), rows()
    least = r"the least is \d+ bytes .*, \d+ % of the exact peak of "
    with pytest.raises(ValueError, match=rf"cannot be met: {least}.* needs\. These would help: a smaller"):
        fit(model, example, memory=0.3, allow=("keep", "recompute"))
    with pytest.raises(ValueError, match=r"before anything is saved .*parameters .*gradients .*optimizer"):
        fit(model, example, memory=static_bytes(model) * 3, optimizer=torch.optim.AdamW)
    assert not hasattr(model, "rmm_plan")
    fit(model, example, "least", allow=("keep", "recompute"))  # the model is as it was, so it can be fitted


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("allow", "options"),
    [
        (("keep", "recompute"), {"keep", "recompute", "selective", "nested"}),
        (("keep", "sketch"), {"keep", "convert linears"}),
        (("keep", "pack"), {"keep", "convert others"}),
        ("pack", {"convert others"}),
        (("keep", "sketch", "pack"), {"keep", *(f"convert {setting.name}" for setting in SETTINGS)}),
        (("recompute",), {"recompute", "selective", "nested"}),
    ],
)
def test_only_what_is_allowed_is_done(allow, options):
    has_choice = allow not in ("pack", ("keep", "sketch"))  # in a stack, which has blocks that are a linear layer alone
    model, example = (stack(2).train(), rows()) if has_choice else (encoder(), batch_of())
    report = fit(model, example, "least" if allow == "pack" else 0.85, allow=allow, max_noise=1e9)
    assert {block.option for block in report.plan.blocks} <= options
    assert {block.option for block in report.plan.blocks} != {"keep"}


@pytest.mark.thorough
def test_blocks_are_offloaded_to_the_folder_that_is_given(tmp_path):
    model, example = encoder(), batch_of()
    report = fit(model, example, memory=0.9, allow=("keep", "offload"), folder=str(tmp_path))
    assert any(block.choice == "offload" for block in report.plan.blocks)
    loss = model(**example).loss
    assert [path for path in tmp_path.rglob("*.safetensors")]
    loss.backward()
    rmm_linear.revert(model)
    with pytest.raises(ValueError, match=r"folder=\.\.\. to offload"):
        fit(model, example, memory=0.3, allow=("keep", "offload"))


@pytest.mark.thorough
def test_the_least_memory_is_no_more_than_a_budget_can_be_met_with():
    model, example = stack(3).train(), rows()
    least = fit(model, example, "least", allow=("keep", "recompute"))
    rmm_linear.revert(model)
    assert fit(model, example, least.peak, allow=("keep", "recompute")).peak == least.peak
    rmm_linear.revert(model)
    with pytest.raises(ValueError, match=f"the least is {least.peak} bytes"):
        fit(model, example, least.peak - 1, allow=("keep", "recompute"))


@pytest.mark.thorough
def test_a_number_of_items_divides_the_loss_whatever_its_type():
    model, example = tiny_model("llama", dropout=0.0).train(), tokens("llama")
    example["labels"] = example["labels"].where(torch.arange(20) < torch.tensor([[20], [11], [8], [15]]), -100)
    count = int((example["labels"][:, 1:] != -100).sum())
    noise = []
    for number in (count, torch.tensor(count)):
        report = fit(model, {**example, "num_items_in_batch": number}, "least", allow=("keep", "pack"), max_noise=1e9)
        noise.append(report.noise)
        rmm_linear.revert(model)
    assert noise[0] == pytest.approx(noise[1], rel=1e-4)


@pytest.fixture
def known_times(monkeypatch):
    """Every option takes a third more time, conversions a tenth less: no clock has a part in it."""

    def times(model, example, options, make, *, rounds=None):
        extra = {
            (name, row.option): -0.1 if row.choice == "convert" else 0.33 for name in options for row in options[name]
        }
        return Times(dict.fromkeys(options, 1.0), extra)

    monkeypatch.setattr("rmm_linear.fitting.options.time_options", times)


@pytest.mark.usefixtures("known_times")
def test_a_bound_on_time_gives_the_least_memory_in_it():
    model, example = stack(3).train(), rows()
    tight = fit(model, example, time=1.05, allow=("keep", "recompute"))
    rmm_linear.revert(model)
    wide = fit(model, example, time=2.0, allow=("keep", "recompute"))
    rmm_linear.revert(model)
    assert tight.memory is None
    assert tight.time <= 1.05 + 1e-6
    assert wide.time <= 2.0
    assert wide.peak < tight.peak <= tight.exact_peak
    with pytest.raises(ValueError, match=r"memory=.* cannot be met in time=1:"):
        fit(model, example, memory=0.5, time=1.0, allow=("keep", "recompute"))


@pytest.mark.parametrize(("noise", "choice"), [(0.01, "convert"), (0.3, "recompute")])
@pytest.mark.usefixtures("known_times")
def test_noise_counts_as_the_time_of_a_batch_that_makes_up_for_it(noise, choice, monkeypatch):
    """A conversion takes 0.43 of a block's time less than recomputation, a seventh of the step's."""

    def measured(model, example, blocks, plans):
        found = {block.name: BlockNoise(0.0, noise) for block in blocks}
        return Noise({setting: found for setting in plans})

    monkeypatch.setattr("rmm_linear.fitting.options.measure_noise", measured)
    report = fit(stack(3).train(), rows(), memory=0.75, allow=("keep", "sketch", "pack", "recompute"))
    assert {block.choice for block in report.plan.blocks} - {"keep"} == {choice}


@pytest.mark.usefixtures("known_times")
@pytest.mark.thorough
def test_least_noise_is_less_than_that_of_least_time():
    model, example = stack(3).train(), rows()
    fastest = fit(model, example, memory=0.75, max_noise=1e9)
    rmm_linear.revert(model)
    quietest = fit(model, example, memory=0.75, max_noise=1e9, objective="noise")
    assert fastest.noise > 0 == quietest.noise
    assert fastest.time < 1 < quietest.time


def test_state_of_the_optimizer_and_gradients_of_earlier_batches_count():
    model, example = stack(3).train(), rows()
    plain = fit(model, example, memory="1GB")
    with_state = fit(stack(3).train(), example, memory="1GB", optimizer=torch.optim.AdamW)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 <= with_state.exact_peak - plain.exact_peak - 2 * gradients < 4 * len(list(model.parameters())) + 1
    rmm_linear.revert(model)
    again = fit(model, example, memory=0.85, accumulate=True)
    run_step(model, example)
    with peak("cpu") as found:
        run_step(model, example)
    assert found.bytes + static_bytes(model) + gradients == again.measured_peak <= again.memory


def test_noise_is_that_of_the_gradient():
    model, example = encoder(), batch_of()
    costs = measure(model, example)
    names = [block.name for block in costs.blocks]
    known = Conversions(model, names)
    setting = next(one for one in SETTINGS if one.name == "tenth")
    rows = converting(names, setting, lambda name: bool(known.chosen(name, setting)))
    rows = [row or PlannedBlock(name, "keep") for row, name in zip(rows, names, strict=True)]
    config = known.configure(rows)
    found = measure_noise(model, example, costs.blocks, {"tenth": BlockPlan(rows, config=config)}, draws=6)
    assert not found.unknown
    expected = gradient_noise(model, example, config, draws=6, by_operation=False)
    # Both are means of ‖ĝ − g‖² over six draws, whose relative deviation is far below a tenth at these sizes.
    whole = sum(block.total for block in found.found["tenth"].values())
    assert whole == pytest.approx(expected.whole(), rel=0.3)
    layer = found.found["tenth"]["roberta.encoder.layer.0"]
    ratios = [
        expected.stand_ins["all"][name] / expected.sgd[name]
        for name in expected.sgd
        if name.startswith("roberta.encoder.layer.0.") and name.endswith("weight") and "LayerNorm" not in name
    ]
    assert layer.worst == pytest.approx(max(ratios), rel=0.5)


def test_options_that_are_too_noisy_are_left_out_by_name():
    report = fit(encoder(), batch_of(), memory=0.7, max_noise=1e-12)
    assert all(block.choice != "convert" or not block.noise for block in report.plan.blocks)
    assert any('"compress, 3 bits" is left out where' in note and "layer.0" in note for note in report.notes)


def test_the_report_can_be_read_saved_and_plotted(tmp_path):
    model, example = encoder(), batch_of()
    report = fit(model, example, memory=0.5, max_noise=1e9, optimizer=torch.optim.AdamW)
    shown = str(report)
    assert shown.startswith("rmm_linear fit: ")
    assert "roberta.encoder.layer." in shown
    assert max(map(len, f"{shown}\n{report.table()}".splitlines())) <= 100
    assert "optimizer" in shown
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved["measured_peak"] == report.measured_peak
    assert saved["static"]["optimizer"] > 0
    assert len(saved["timeline"]["before"]) > 10
    assert saved["plan"]["blocks"][0]["name"] == "roberta.embeddings"
    lines = report.plot().get_lines()
    assert len(lines) >= 2
    report.plan.save(tmp_path / "plan.json")
    rmm_linear.revert(model)
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.blocks == report.plan.blocks
    assert loaded.config == report.plan.config
    loaded.apply(model)
    assert real_peak(model, example) + static_bytes(model) + report.static.optimizer == report.measured_peak


def test_a_model_on_the_meta_device_is_planned_without_values():
    report = fit(stack(2).train().to("meta"), rows().to("meta"), memory=0.85)
    assert report.measured_peak is None
    assert report.noise is None
    assert report.fits
    assert any("The variance ratio is not measured" in note for note in report.notes)
    assert all(block.setting != "narrow" for block in report.plan.blocks)
    assert report.exact_peak == fit(stack(2).train(), rows(), memory="1GB").exact_peak


class Plain(nn.Module):
    """No module of its own is called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"memory": 0.0}, ValueError, r"must be in \(0, 1\], .* got 0.0"),
        ({"memory": float("nan")}, ValueError, r"must be in \(0, 1\], .* got nan"),
        ({"memory": 1.5}, ValueError, "Use an integer or a text"),
        ({"memory": 1}, ValueError, "memory=1 cannot be met: .* are needed before anything is saved"),
        ({"memory": -8}, ValueError, "at least one byte, got -8"),
        ({"memory": True}, TypeError, "must be a number of bytes or a text, got True"),
        ({"memory": "8 gigs"}, ValueError, "memory must be a size, got '8 gigs'.* such as 0.6, or \"60%\""),
        ({"memory": None}, TypeError, "got neither"),
        ({"allow": ["recomput"]}, ValueError, "Did you mean 'recompute'"),
        ({"allow": "keep,recompute"}, ValueError, "allow must be of keep, sketch"),
        ({"allow": "keep"}, ValueError, 'cannot be met: the least is .*"recompute" in allow'),
        ({"memory": None, "time": 0}, ValueError, "time must be positive, .* got 0"),
        ({"memory": None, "time": float("nan")}, ValueError, "time must be positive"),
        ({"memory": None, "time": 1e-9}, ValueError, "time=1e-09 cannot be met by any plan"),
        (
            {"memory": 0.3, "time": 1.0, "allow": ("keep", "recompute")},
            ValueError,
            r"cannot be met in time=1: the least is",
        ),
        ({"max_noise": 0}, ValueError, "max_noise must be positive, got 0"),
        ({"max_noise": float("nan")}, ValueError, "max_noise must be positive, got nan"),
        ({"objective": "speed"}, ValueError, "objective must be one of time, noise, got 'speed'"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be an instance"),
        ({"model": "model"}, TypeError, r"must be a torch\.nn\.Module, got str"),
        ({"model": Plain()}, ValueError, r"none of its modules is called by itself.*nn\.Sequential"),
        ({"model": nn.Sequential(nn.Linear(8, 2)).requires_grad_(False)}, ValueError, "Set requires_grad"),
        ({"example": {"x": rows()}}, TypeError, "example must have the arguments of Sequential, and does not"),
        ({"example": rows(0)}, ValueError, "cannot be met"),
    ],
)
def test_wrong_arguments(changes, error, text):
    model = nn.Sequential(nn.Linear(8, 16), Normed(), nn.Linear(16, 2))
    arguments = {"model": model, "example": rows(), "memory": 0.5, **changes}
    with pytest.raises(error, match=text):
        rmm_linear.fit(**arguments)
    assert "rmm_plan" not in vars(model)


@pytest.mark.parametrize("changes", [{"memory": "8GB"}, {"memory": None, "time": 1.0, "allow": ["keep"]}])
def test_arguments_at_their_ends(changes):
    report = rmm_linear.fit(stack(1).train(), rows(), max_noise=float("inf"), **{"memory": 1.0, **changes})
    assert report.is_exact
    assert report.fits

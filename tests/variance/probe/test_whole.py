"""GradientProbe measures the whole gradient on the batch of a training step, and training goes on to the bit."""

import contextlib

import pandas as pd
import pytest
import torch
from cases import CONFIG
from helpers import Mlp, enable_checkpointing, snapshot, tiny_model
from probe_helpers import padded_batch
from torch import nn

from rmm_linear import RMMConfig, convert, sketch_state, sketch_tensors
from rmm_linear.memory import track_saved
from rmm_linear.variance import GradientProbe, WholeRow, gradient_noise
from rmm_linear.variance.probe.results import WHOLE_COLUMNS

CONVERSIONS = {
    "auto": {"min_rows": 4, "memory": 0.3},
    "estimators": {"min_rows": 4, "kind": "wta", "ratio": 0.3, "norm_estimator": "position_token"},
    "plain": None,
}


def batches(count=6):
    torch.manual_seed(4)
    order = [torch.randperm(4) for _ in range(count)]
    return [{name: value[rows] for name, value in padded_batch().items()} for rows in order]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("conversion", "dtype"),
    [("auto", None), ("estimators", None), ("plain", None), ("auto", torch.bfloat16)],
    ids=["auto", "estimators", "plain", "autocast"],
)
def test_training_goes_on_to_the_bit(conversion, dtype):
    """With gradients accumulated over two passes."""
    found = []
    for whole_every in (None, 1):
        model = tiny_model("roberta", dropout=0.1).train()
        if CONVERSIONS[conversion] is not None:
            convert(model, **CONVERSIONS[conversion])
        before = snapshot(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = batches()
        torch.manual_seed(2)
        with GradientProbe(model, every=1, whole_every=whole_every, draws=1) as probe:
            for number, batch in enumerate(data, start=1):
                with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
                    loss = model(**batch).loss
                loss.backward()
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        assert list(probe.whole) == ([] if whole_every is None else [1, 2, 3, 4, 5, 6])
        assert snapshot(model) == before
        state = {} if CONVERSIONS[conversion] is None else (sketch_state(model), sketch_tensors(model))
        found.append((dict(model.named_parameters()), torch.get_rng_state(), probe.rows, state))
    (expected, generator, rows, state), measured = found
    assert all(torch.equal(value, expected[name]) for name, value in measured[0].items())
    assert torch.equal(measured[1], generator)
    assert repr(measured[2:]) == repr((rows, state))


@pytest.mark.parametrize("converted", [True, False], ids=["converted", "plain"])
def test_it_is_the_noise_of_the_passes_batch(converted):
    model, config = tiny_model("roberta", dropout=0.1).train(), RMMConfig(min_rows=4)
    if converted:
        convert(model, config)
    first, second = batches(2)
    with GradientProbe(model, every=1, whole_every=2, config=None if converted else config, draws=2) as probe:
        model(**first).loss.backward()
        torch.manual_seed(9)
        # Positional arguments are given by their names, and the output of no_grad counts as no pass.
        loss = model(second["input_ids"], attention_mask=second["attention_mask"], labels=second["labels"]).loss
        loss.backward()
    torch.manual_seed(9)
    expected = gradient_noise(model, second, None if converted else config, draws=2)
    assert probe.whole == {2: expected}
    assert probe.passes == 2


class Averaging(nn.Module):
    """A model with running averages and a part that is in eval mode while the model trains."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.dense = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x, *more, labels=None):
        assert not self.frozen.training
        self.calls += 1
        output = self.dense(self.frozen(self.norm(x.flatten(0, 1))).view(x.shape))
        return {"loss": None if labels is None else (output - labels).square().mean()}


def averaging():
    model = Averaging().train()
    model.frozen.eval()
    convert(model, CONFIG, min_rows=1)
    return model, {"x": torch.randn(4, 10, 6), "labels": torch.randn(4, 10, 3)}


def test_running_averages_and_modes_stay():
    found = []
    for whole_every in (None, 1):
        torch.manual_seed(0)
        model, batch = averaging()
        with GradientProbe(model, every=1, whole_every=whole_every) as probe:
            for _ in range(2):
                model(**batch)["loss"].backward()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert len(probe.whole) == 2
    assert model.calls > 2 * 5
    assert found[1]["norm.num_batches_tracked"] == 2
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda model, b: model(b["x"][:1], labels=b["labels"][:1]), "at least 2 sequences, got 1"),
        (lambda model, b: model(b["x"]), "has a scalar loss, got dict without one"),
        (lambda model, b: model(b["x"], 1, labels=b["labels"]), "positional arguments that have no names"),
    ],
    ids=["one sequence", "no loss", "positional"],
)
def test_a_batch_that_cannot_be_used_is_reported_once_and_training_goes_on(call, reason, caplog):
    model, batch = averaging()
    with GradientProbe(model, every=1, whole_every=1) as probe:
        for _ in range(2):
            output = call(model, batch)["loss"]
            if output is not None:
                output.backward()
        model(**batch)["loss"].backward()
    assert list(probe.whole) == [3]
    (record,) = [one for one in caplog.records if "BatchNorm" not in one.message]
    assert record.getMessage().startswith("Step 1: the variance ratio of the whole gradient is not measured: ")
    assert reason in record.getMessage()


def test_reentrant_checkpoints_are_reported_and_the_others_measured(caplog):
    """torch refuses autograd.grad through reentrant ones, with the remedy in its words."""
    for reentrant in (True, False):
        model = tiny_model("roberta", dropout=0.0).train()
        convert(model, min_rows=4)
        enable_checkpointing(model, reentrant=reentrant)
        with GradientProbe(model, every=1, whole_every=1, draws=1) as probe:
            model(**padded_batch()).loss.backward()
        assert len(probe.whole) == (not reentrant)
        assert len(probe.rows) > 0
    assert caplog.text.count("is not measured") == 1
    assert "use_reentrant" in caplog.text


def test_other_probes_and_ledgers_do_not_see_the_measurement():
    model, batch = averaging()
    with track_saved(model) as alone:
        loss = model(**batch)["loss"]
    loss.backward()
    with (
        GradientProbe(model, every=2) as first,
        GradientProbe(model, every=1, whole_every=1) as second,
        GradientProbe(model, every=1) as third,
    ):
        with track_saved(model) as saved:
            loss = model(**batch)["loss"]
        loss.backward()
        gradient_noise(model, batch, draws=1)
        model(**batch)["loss"].backward()
    assert saved.total == alone.total
    assert first.passes == second.passes == third.passes == 2
    assert [row.step for row in first.rows] == [2]
    assert [row.step for row in second.rows] == [row.step for row in third.rows] == [1, 2]
    assert list(second.whole) == [1, 2]


def test_arm_says_whether_the_whole_gradient_is_measured():
    model, batch = averaging()
    with GradientProbe(model, every=None, whole_every=2, draws=1) as probe:
        for step, whole in ((10, True), (20, None), (30, False), (40, False), (50, None), (60, None)):
            probe.arm(step, whole=whole)
            model(**batch)["loss"].backward()
    assert list(probe.whole) == [10, 20, 60]


def test_rows_csv_and_summary_have_the_results(tmp_path):
    model, batch = averaging()
    with GradientProbe(model, every=1, whole_every=2) as probe:
        for _ in range(4):
            model(**batch)["loss"].backward()
    rows = probe.whole_rows()
    assert [(row.step, row.operation, row.block) for row in rows[: len(rows) // 2]] == [
        (2, operation, block)
        for operation in ("all", "linear")
        for block in [name for name, _ in model.named_parameters()]  # no numbers in the names
    ]
    for row in rows:
        noise = probe.whole[row.step]
        assert (row.noise, row.sgd) == noise.totals(row.operation)[row.block]
        assert row.ratio == noise.by_depth(row.operation)[row.block]
    assert sum(row.noise for row in rows if row.step == 2 and row.operation == "all") > 0
    path = tmp_path / "whole.csv"
    probe.whole_to_csv(path)
    frame = pd.read_csv(path, float_precision="round_trip")
    assert tuple(frame.columns) == WHOLE_COLUMNS
    pd.testing.assert_frame_equal(frame, pd.DataFrame(rows), check_exact=True)
    assert [WholeRow(**row) for row in frame.to_dict("records")] == rows
    assert str(probe).endswith(
        f"whole gradient at step 4, variance ratio D2 / D2_SGD by block and operation\n{probe.whole[4]}"
    )


@pytest.mark.parametrize("name", ["whole_every", "draws"])
def test_wrong_arguments_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        GradientProbe(Mlp(), **{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be a positive integer.*got 1.5"):
        GradientProbe(Mlp(), **{name: 1.5})

"""What modules learn in their first steps: rows without a gradient, and attention whose scores spread far."""

import copy
import pickle

import pytest
import torch
from helpers import bytes_kept, tiny_model
from torch import nn

from rmm_linear import RMMConfig, convert, revert
from rmm_linear.context import left_out
from rmm_linear.context.learned import MOST_SPREAD, STEPS, GradientRows, ScoreSpread
from rmm_linear.fitting.executor import Conversion
from rmm_linear.variance import gradient_noise


class Reader(nn.Module):
    """Two layers over sequences; the loss reads one row of each."""

    def __init__(self, read):
        super().__init__()
        self.first, self.norm, self.act, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16)
        self.read = read

    def forward(self, x, attention_mask=None):
        return self.read(self.last(self.act(self.norm(self.first(x)))), attention_mask)


def first(h, mask):
    return h[:, 0]


def first_two(h, mask):
    return h[:, :2]


def last(h, mask):
    lengths = h.shape[1] - 1 if mask is None else mask.sum(1) - 1
    return h[torch.arange(len(h)), lengths]


def all_rows(h, mask):
    return h


def mask_of(rows=20, length=12):
    return (torch.arange(length) < torch.arange(rows).unsqueeze(1) % 5 + 8).long()


def run(model, mask=None, rows=20, length=12):
    torch.manual_seed(3)
    model.zero_grad()
    model(torch.randn(rows, length, 16), mask).square().sum().backward()


def converted(read, **fields):
    torch.manual_seed(0)
    model = Reader(read)
    report = convert(model, RMMConfig(min_rows=30, **fields))
    return model, report


def taught(read, steps=STEPS + 1):
    model, report = converted(read)
    for _ in range(steps):
        run(model)
    return model, report


@pytest.mark.parametrize("mask", [None, mask_of()], ids=["no mask", "padding"])
@pytest.mark.parametrize(
    ("read", "kept", "said"),
    [
        (first, 20, "the first of every sequence"),
        (last, 20, "the last of every sequence"),
    ],
)
def test_rows_with_a_gradient_alone_are_saved_from_the_fourth_step_on(read, kept, said, mask):
    model, report = converted(read)
    exact = Reader(read)
    exact.load_state_dict(model.state_dict())
    for length in (12, 11, 12):
        assert report.rows == {}
        run(model, mask if mask is None else mask[:, :length], length=length)
    run(model, mask)
    assert set(report.rows) == {"first", "norm", "act", "last"}
    assert set(report.rows.values()) == {said}
    assert said in str(report)
    run(exact, mask)
    # As they are, being few: the layer whose own gradient is exact has the exact one.
    torch.testing.assert_close(model.last.weight.grad, exact.last.weight.grad, rtol=1e-5, atol=1e-5)
    x = torch.randn(20, 12, 16, requires_grad=True)
    (entry,) = [one for one in model.modules() if one is model.act]
    assert bytes_kept(model, x, mask) < bytes_kept(exact, x, mask) / 3
    assert entry.rmm_context.rows_of(entry.rmm_index).mask((20, 12), None, x.device).valid_count == kept


def test_a_model_that_reads_all_rows_leaves_out_none():
    _model, report = taught(all_rows, STEPS + 2)
    assert report.rows == {}


def test_a_gradient_in_rows_that_were_not_saved_is_an_error():
    model, report = taught(first)
    model.read = all_rows
    with pytest.raises(RuntimeError, match=r"had a gradient in the first or last rows.*mask_padding=False"):
        run(model)
    run(model)  # the next step saves all rows
    assert report.rows == {}


def test_on_a_device_it_is_an_error_after_the_next_forward_pass(monkeypatch):
    """Which need not wait for it; and all is as after an error at once."""
    monkeypatch.setattr(left_out, "waits", lambda device: True)
    model, report = taught(first)
    model.read = all_rows
    run(model)
    with pytest.raises(RuntimeError, match=r"had a gradient in the first or last rows.*mask_padding=False"):
        model(torch.randn(20, 12, 16))
    run(model)
    assert report.rows == {}
    run(model)


def test_all_rows_are_saved_without_mask_padding():
    model, report = converted(first, mask_padding=False)
    for _ in range(STEPS + 2):
        run(model)
    assert report.rows == {}
    model.read = all_rows
    run(model)


def test_steps_without_a_gradient_or_with_an_overflow_teach_nothing():
    model, report = converted(first)
    for factor in (0.0, float("inf"), float("nan"), 1.0, 1.0, 1.0):
        assert report.rows == {}
        torch.manual_seed(3)
        model.zero_grad()
        (model(torch.randn(20, 12, 16)).sum() * factor).backward()
    run(model)
    assert len(report.rows) == 4


def test_a_longer_pattern_in_one_of_the_steps_counts():
    model, report = converted(first)
    for read in (first, first_two, first):
        model.read = read
        run(model)
    run(model)
    assert report.rows == {}


def test_short_texts_in_long_padding_show_no_pattern():
    """All rows with a gradient are at the beginning then, in all layers."""
    model, report = converted(all_rows)
    mask = (torch.arange(40) < 10).expand(20, 40).long()
    for _ in range(STEPS + 1):
        model.zero_grad()
        (model(torch.randn(20, 40, 16), mask).square() * mask.unsqueeze(-1)).sum().backward()
    assert report.rows == {}


def test_the_last_row_of_sequences_of_one_length_without_a_mask_is_no_pattern():
    _model, report = taught(last)
    assert report.rows == {}


def test_a_pass_that_was_begun_before_an_error_is_checked_too():
    model, report = taught(first)
    model.read = all_rows
    one, other = (model(torch.randn(20, 12, 16)).square().sum() for _ in range(2))
    for loss in (one, other):
        with pytest.raises(RuntimeError, match="had a gradient in the first or last rows"):
            loss.backward()
    run(model)
    assert report.rows == {}


def test_short_sequences_after_the_decision_are_saved_whole():
    model, report = taught(first)
    assert report.rows
    run(model, rows=40, length=1)


def test_copies_and_pickles_know_what_was_learned():
    model, report = taught(first)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        run(again)
        learned = again.last.rmm_context.learned
        assert [one.pattern for one in learned.values() if isinstance(one, GradientRows)] == [1] * 4
    assert report.rows


def test_measuring_the_noise_teaches_nothing():
    model = tiny_model("roberta")
    report = convert(model, min_rows=4)
    batch = {"input_ids": torch.randint(5, 50, (8, 20)), "labels": torch.zeros(8, dtype=torch.int64)}
    gradient_noise(model, batch, draws=3, by_operation=False)
    assert all(not one.unread and not one.steps for one in report.context.learned.values())
    for _ in range(STEPS + 1):
        model(**batch).loss.backward()
    assert report.rows
    gradient_noise(model, batch, draws=1, by_operation=False)
    assert report.rows


def test_attention_whose_scores_spread_far_takes_wide_queries_and_keys():
    model = tiny_model("roberta", dropout=0.0)
    wide, narrow = (layer.attention.self for layer in model.roberta.encoder.layer)
    with torch.no_grad():
        wide.query.weight.mul_(3000)
    report = convert(model, min_rows=4)
    batch = {"input_ids": torch.randint(5, 50, (8, 20)), "labels": torch.zeros(8, dtype=torch.int64)}
    for _ in range(STEPS):
        assert report.wide_attention == {}
        model(**batch).loss.backward()
    model(**batch)
    (name,) = report.wide_attention
    assert model.get_submodule(name) is wide is not narrow
    assert report.wide_attention[name] > MOST_SPREAD
    assert "8 for queries and keys" in str(report)


@pytest.mark.parametrize("is_planned", [False, True])
def test_scores_that_spread_later_are_seen_but_in_a_plan_whose_budget_they_would_exceed(is_planned):
    model = tiny_model("roberta", dropout=0.0)
    wide = model.roberta.encoder.layer[0].attention.self
    batch = {"input_ids": torch.randint(5, 50, (8, 20)), "labels": torch.zeros(8, dtype=torch.int64)}
    config = RMMConfig(min_rows=4, operations=["attention"])
    conversion = Conversion(model, config)
    conversion.attach()
    if not is_planned:
        revert(model)
        conversion.report = convert(model, config)
    for step in range(64):
        if step == STEPS:
            with torch.no_grad():
                wide.query.weight.mul_(3000)
        assert conversion.report.wide_attention == {}
        model(**batch).loss.backward()
    model(**batch)
    found = [model.get_submodule(name) for name in conversion.report.wide_attention]
    assert found == ([] if is_planned else [wide])


def test_the_spread_of_scores_is_their_standard_deviation():
    query, key = torch.randn(3, 4, 50, 8, dtype=torch.float64), torch.randn(3, 2, 30, 8, dtype=torch.float64) + 5
    query[:, 1] *= 7
    spread = ScoreSpread()
    for _ in range(STEPS):
        spread.observe(query, key, 0.3)
    scores = 0.3 * query @ key.repeat_interleave(2, 1).transpose(-1, -2)
    of_heads = scores.var(-1, correction=0).mean((0, 2)).sqrt()
    assert float(spread.unread[0][0]) == pytest.approx(float(of_heads.max()), rel=1e-4)

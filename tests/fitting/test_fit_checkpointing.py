"""A plan takes the place of activation checkpointing, which revert turns on again, or leaves it and names it."""

import re

import pytest
import torch
from helpers import tiny_model, token_ids
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import rmm_linear
from rmm_linear.context.checkpointing import is_checkpointed
from rmm_linear.integrations.transformers import RMMCallback
from rmm_linear.planning import load_plan

KEPT = {"memory": 1.0, "allow": ["keep"]}
BATCH = {"input_ids": token_ids(), "labels": torch.zeros(len(token_ids()), dtype=torch.int64)}


def by_method(model):
    model.activation_checkpointing_enable({"use_reentrant": False})


def by_older_name(model):
    """As models of transformers before 5.24 have it, and trainers set it."""
    for layer in model.roberta.encoder.layer:
        layer.gradient_checkpointing = False
        layer.activation_checkpointing = True
        layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint


def by_wrapper(model):
    layers = model.roberta.encoder.layer
    layers[0] = checkpoint_wrapper(layers[0])


def checkpointed(turn_on=by_method):
    model = tiny_model("roberta").train()
    turn_on(model)
    return model


@pytest.mark.parametrize("turn_on", [by_method, by_older_name, by_wrapper])
def test_a_plan_turns_it_off_until_it_is_reverted(turn_on, tmp_path):
    model, plain = checkpointed(turn_on), tiny_model("roberta")
    report = rmm_linear.fit(model, BATCH, **KEPT)
    assert report.exact_peak == rmm_linear.fit(plain, BATCH, **KEPT).exact_peak
    assert "revert() turns it on again" in str(report)
    report.plan.save(tmp_path / "plan.json")
    for again in (report.plan, load_plan(tmp_path / "plan.json")):
        assert not [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
        rmm_linear.revert(model)
        assert is_checkpointed(model)
        again.apply(model)
        assert "checkpointing" not in str(model.config.to_dict())
    rmm_linear.revert(model)
    assert is_checkpointed(model)


def test_it_stays_where_nothing_fits_or_a_batch_is_looked_for():
    model = checkpointed()
    with pytest.raises(ValueError, match=r"memory='70KB' cannot be met") as failed:
        rmm_linear.fit(model, BATCH, "70KB", allow=["keep"])
    assert "Activation checkpointing is on" not in str(failed.value)
    assert is_checkpointed(model)
    assert rmm_linear.max_batch(model, BATCH, "1KB", allow=["keep"]).batch == 0
    assert is_checkpointed(model)


def test_it_is_kept_and_named_where_that_is_asked_for():
    model = checkpointed()
    with pytest.raises(ValueError, match=r'Activation checkpointing is on: .* checkpointing="replace" turns it off'):
        rmm_linear.fit(model, BATCH, "70KB", allow=["keep"], checkpointing="keep")
    report = rmm_linear.fit(model, BATCH, checkpointing="keep", **KEPT)
    assert report.exact_peak < rmm_linear.fit(tiny_model("roberta"), BATCH, **KEPT).exact_peak
    assert is_checkpointed(model)
    with pytest.raises(ValueError, match="Did you mean 'replace'"):
        rmm_linear.fit(model, BATCH, checkpointing="replaced", **KEPT)


@pytest.mark.parametrize(("one", "other"), [("keep", "replace"), ("replace", "keep")])
def test_a_callback_that_is_told_both_says_so(one, other):
    text = f"must agree, got checkpointing='{one}' and fit={{\"checkpointing\": '{other}'}}. Give one"
    with pytest.raises(ValueError, match=re.escape(text)):
        RMMCallback(fit={"memory": "1GB", "checkpointing": other}, checkpointing=one)
    agreed = RMMCallback(fit={"memory": "1GB", "checkpointing": one}, checkpointing=one)
    assert agreed._fitting.settings["checkpointing"] == one


@pytest.mark.parametrize(
    ("memory", "said"), [("70KB", "'70KB'"), (0.2, r"0\.2 \([\d.]+ KiB\)"), ("20%", r"'20%' \([\d.]+ KiB\)")]
)
def test_a_budget_is_named_as_it_was_given(memory, said):
    with pytest.raises(ValueError, match=f"^memory={said} cannot be met"):
        rmm_linear.fit(tiny_model("roberta"), BATCH, memory, allow=["keep"])


def test_a_share_in_percent_is_that_share():
    peaks = [rmm_linear.fit(tiny_model("roberta"), BATCH, share, allow=["keep"]).memory for share in (1.0, "100%")]
    assert peaks[0] == peaks[1]
    with pytest.raises(ValueError, match=r"must be in \(0, 1\], or \(0 %, 100 %\], got '130%'"):
        rmm_linear.fit(tiny_model("roberta"), BATCH, "130%")
    with pytest.raises(TypeError, match="A share has no meaning here"):
        rmm_linear.max_batch(tiny_model("roberta"), BATCH, "60%")

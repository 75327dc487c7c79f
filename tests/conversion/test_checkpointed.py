"""Modules that activation checkpointing recomputes stay exact by default, and reports and messages say so."""

import helpers
import pytest
import torch
from cases import checkpoints
from helpers import enable_checkpointing, tiny_model, token_ids
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert, revert
from rmm_linear.context.checkpointing import is_checkpointed, uncheckpointed
from rmm_linear.conversion.checkpointed import checkpointed_blocks
from rmm_linear.memory import explain, track_saved

INPUT = "the input of a block that activation checkpointing recomputes"
MESSAGE = "Activation checkpointing recomputes"
ARCHITECTURES = ["roberta", "gpt2", "llama", "vit", "t5"]
OUTSIDE = r"(?!.*\.(layer|layers|h|block)\.\d).*"  # names of modules that no block has inside


class Loop(nn.Module):
    """Calls torch.utils.checkpoint itself for every block, and has a norm outside of them."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.norm, self.reentrant = nn.LayerNorm(8), reentrant

    def forward(self, x):
        x = x * 1.5
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


def features():
    return torch.randn(200, 8, requires_grad=True)


def made(architecture="llama", reentrant=False):
    model = tiny_model(architecture, dropout=0.3).train()
    model.config.use_cache = False
    enable_checkpointing(model, reentrant)
    return model


def step(model, architecture):
    return helpers.step(model, architecture, seed=5)[1]


def said(caplog):
    (message,) = [one for one in caplog.messages if MESSAGE in one]
    return message


@checkpoints
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_are_those_of_the_exact_model_to_the_bit(architecture, reentrant):
    """Dropout included, whose masks the recomputation must repeat; nothing outside of blocks is converted."""
    exact = step(made(architecture, reentrant), architecture)
    model = made(architecture, reentrant)
    report = convert(model, min_rows=1, exclude_modules=OUTSIDE)
    assert set(report.checkpointed) == {*report.converted, *report.packed}
    found = step(model, architecture)
    assert found.keys() == exact.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in exact.items())


def test_blocks_are_found_by_flags_and_wrappers():
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture)
        assert checkpointed_blocks(model) == {}
        enable_checkpointing(model, False)
        blocks = checkpointed_blocks(model)
        assert len(blocks) == (4 if architecture == "t5" else 2)
        with uncheckpointed(model):
            assert checkpointed_blocks(model) == {}
        assert checkpointed_blocks(model).keys() == blocks.keys()
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.GELU())), nn.Linear(4, 4))
    assert list(checkpointed_blocks(wrapped)) == ["0"]
    report = convert(wrapped, min_rows=1)
    assert len(report.checkpointed) == 2
    revert(wrapped)
    with uncheckpointed(wrapped), track_saved(wrapped) as saved:
        output = wrapped(torch.randn(8, 4))
    assert len(saved.by_module) == 3
    del output
    assert list(checkpointed_blocks(wrapped)) == ["0"]


def test_flags_stay_off_modules_that_ask_others_for_attributes():
    """Those of PEFT do."""
    model = get_peft_model(tiny_model("llama").model, LoraConfig(target_modules=["q_proj"]))
    model.base_model.model.gradient_checkpointing_enable()
    with uncheckpointed(model):
        assert not is_checkpointed(model)
    assert is_checkpointed(model)
    model.base_model.model.gradient_checkpointing_disable()
    assert not is_checkpointed(model)


def test_a_wrapper_that_is_off_already_keeps_its_function():
    wrapped = checkpoint_wrapper(nn.Linear(4, 4))
    function = wrapped.checkpoint_fn
    with uncheckpointed(wrapped), uncheckpointed(wrapped) as again:
        assert not again.is_attached
    assert wrapped.checkpoint_fn is function


@checkpoints
def test_it_is_said_once_at_conversion(reentrant, caplog):
    model = made("roberta", reentrant)
    report = convert(model, min_rows=1)
    message = said(caplog)
    assert f"recomputes {len(report.checkpointed)} of the {len(report.converted) + len(report.packed)} " in message
    assert "roberta.encoder.layer.{0-1}.attention.self.query" in message
    assert 'convert with checkpointed="packed"' in message
    recomputed = [name for name in report.converted if name in report.checkpointed]
    assert f" exact_recomputed={len(recomputed)}" in report.summary()
    assert f"\nhint: checkpointing is on: {len(report.checkpointed)} modules are recomputed" in str(report)
    assert f"\n{len(report.checkpointed)} modules are recomputed under activation checkpointing" in str(report)
    assert report.to_dict()["checkpointed"] == list(report.checkpointed)
    step(model, "roberta")
    assert said(caplog) == message


@checkpoints
def test_checkpointing_that_is_turned_on_later_is_said_in_the_first_step(reentrant, caplog):
    model = tiny_model("roberta", dropout=0.3).train()
    assert convert(model, min_rows=1).checkpointed == ()
    step(model, "roberta")
    assert MESSAGE not in caplog.text
    enable_checkpointing(model, reentrant)
    for _ in range(2):
        step(model, "roberta")
    # Dropout of attention, p = 0.3 too, is not called as a module: 24 of the 26 in blocks are.
    assert "recomputes 24 of the " in said(caplog)
    assert "roberta.encoder.layer.{0-1}." in said(caplog)


@checkpoints
def test_packed_compresses_recomputed_modules_and_says_nothing(reentrant, caplog):
    exact = step(made("roberta", reentrant), "roberta")
    model = made("roberta", reentrant)
    report = convert(model, min_rows=1, checkpointed="packed")
    assert report.checkpointed
    assert "stays exact" not in str(report)
    name = "roberta.encoder.layer.0.output.dense.weight"
    assert not torch.equal(step(model, "roberta")[name], exact[name])
    assert MESSAGE not in caplog.text


def test_patterns_may_differ(caplog):
    """The first block packs; the message counts the other one's modules."""
    report = convert(made("roberta"), min_rows=1, overrides={r".*layer\.0\..*": {"checkpointed": "packed"}})
    rest = [name for name in report.checkpointed if "layer.1." in name]
    assert f"recomputes {len(rest)} of the " in said(caplog)


@pytest.mark.parametrize("mode", ["exact", "packed"])
def test_the_line_says_what_a_recomputed_block_saves_in_each_mode(mode):
    model = made()
    report = convert(model, example={"input_ids": token_ids()}, min_rows=1, checkpointed=mode)
    block, note = report.memory.recomputed, " ".join(report.memory.note().split())
    assert block.name == "model.layers.0"
    assert block.packed < 0.4 * block.before
    stays = 'inside of it: stays 0.13 MiB, and checkpointed="packed" would make it 0.01 MiB.'
    assert note.endswith(stays if mode == "exact" else "inside of it: 0.13 → 0.01 MiB.")
    assert block.after == (block.before if mode == "exact" else block.packed)


def test_a_block_may_be_exact_in_part():
    model = made()
    overrides = {".*mlp.*": {"checkpointed": "packed"}}
    report = convert(model, example={"input_ids": token_ids()}, min_rows=1, overrides=overrides)
    block = report.memory.recomputed
    assert block.packed < block.after < block.before
    assert ' MiB, and checkpointed="packed" would make it ' in " ".join(report.memory.note().split())
    assert report.to_dict()["memory"]["recomputed"] == vars(block)


@pytest.mark.parametrize("options", [{}, {"operations": ("linear",)}, {"checkpointed": "packed"}])
@checkpoints
def test_an_example_shows_checkpoints_in_a_forward_of_ones_own(reentrant, options, caplog):
    """Their modules stay converted, are reported as recomputed, and it is said at once; the norm is outside."""
    model = Loop(reentrant).train()
    report = convert(model, example=features(), **options)
    assert len(report.converted) == 6
    assert report.skipped == {}
    assert set(report.checkpointed) == {*report.converted, *report.packed} - {"norm"}
    reasons = {layer.reason.partition(",")[0] for layer in report.memory.layers.values()}
    assert reasons == {"recomputed under activation checkpointing"}
    assert all(layer.before == layer.after == 0 for layer in report.memory.layers.values())
    model(features()).square().sum().backward()
    assert len([one for one in caplog.messages if MESSAGE in one]) == ("checkpointed" not in options)


@checkpoints
def test_layers_outside_of_a_checkpoint_are_still_skipped(reentrant):
    model = nn.Sequential(Loop(reentrant), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).train()
    report = convert(model, example=features(), operations=("linear",))
    assert report.skipped == {"3": "Tanh saves this tensor anyway"}
    assert set(report.checkpointed) == {name for name in report.converted if name.startswith("0.blocks.")}


def test_a_forward_without_gradients_is_no_checkpoint():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                x = self.features(x)
            return self.head(x)

    report = convert(Frozen().train(), example=features(), operations=("linear",))
    assert report.skipped == {"features": "autograd does not save its input"}
    assert report.checkpointed == ()


@checkpoints
def test_the_input_of_a_block_is_called_so(reentrant):
    for model, batch, places in (
        (made(reentrant=reentrant), {"input_ids": token_ids()}, ["model.layers.{0-1}"]),
        (Loop(reentrant).train(), features(), [""]),
    ):
        found = explain(model, batch, min_rows=1)
        reasons = {keeper.modules: keeper.reason for keeper in found.remaining}
        assert all(reasons[place].endswith(INPUT) for place in places)
        assert "no output of the model" not in str(found)


def test_an_explanation_begins_with_its_totals():
    found = explain(made(), {"input_ids": token_ids()}, min_rows=1)
    assert str(found).startswith(f"rmm_linear: saved_before={found.before} ")
    assert " ".join(str(found).split("\nhint: ")[0].split()).endswith(found.line())
    assert (
        f"{found.share_of(found.kinds['inputs of recomputed blocks']):.0%} inputs of recomputed blocks" in found.line()
    )
    assert "recomputes model.layers.0" in str(found)


@checkpoints
def test_modules_and_what_is_left_are_named_for_sequentials(reentrant, caplog):
    """The reentrant kind shows them in the backward pass, and says it at its end."""
    model = Loop(reentrant).train()
    convert(model)
    model(features()).square().sum().backward()
    assert "9 of the 10 converted modules (blocks.{0-2}.{0-2})" in said(caplog)
    assert "saves memory in the other 1 alone" in said(caplog)
    caplog.clear()
    revert(model)
    convert(model, operations=("linear",))
    model(features()).square().sum().backward()
    assert "the conversion saves memory nowhere" in said(caplog)


def test_a_backward_pass_that_fails_is_made_up_for_in_the_next_forward_pass(caplog):
    model = Loop(reentrant=True).train()
    convert(model)
    x = features()
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x).square().sum().backward()
    assert not caplog.messages
    model(features())
    assert "9 of the 10 converted modules" in said(caplog)


def test_a_measurement_does_not_say_it_in_place_of_the_training_step(caplog):
    model = Loop(reentrant=False).train()
    explain(model, features())
    assert not caplog.messages
    convert(model)
    model(features())
    assert "9 of the 10 converted modules" in said(caplog)


def test_the_remedy_is_one_that_the_model_has(caplog):
    model = made()
    convert(model, min_rows=1)
    method = said(caplog).partition("turn checkpointing off: model.")[2].partition("()")[0]
    assert method in ("activation_checkpointing_disable", "gradient_checkpointing_disable")
    assert (method == "activation_checkpointing_disable") == hasattr(model, "activation_checkpointing_disable")
    getattr(model, method)()
    with track_saved(model) as saved:
        output = model(input_ids=token_ids())
    assert any("mlp" in name for name in saved.by_module)
    del output
    caplog.clear()
    convert(nn.Sequential(made()), min_rows=1)
    assert f"turn checkpointing off: model.0.{method}()" in said(caplog)


def test_a_plain_module_is_not_told_of_methods_that_it_has_not(caplog):
    model = Loop(reentrant=False).train()
    convert(model)
    model(features())
    assert "turn checkpointing off: do not call torch.utils.checkpoint. " in said(caplog)
    caplog.clear()
    convert(nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8))))
    assert "turn checkpointing off: leave out checkpoint_wrapper. " in said(caplog)

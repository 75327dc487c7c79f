"""The snippets of every page run by themselves, in order, and do what the page says."""

import contextlib
import csv
import functools
import re

import pytest
import torch
from doc_pages import PAGES, blocks, name
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaForSequenceClassification,
    TrainingArguments,
)

from rmm_linear import RMMConfig, RMMLinear
from rmm_linear.planning.chains.schedules import recomputed

LONG = tuple(f"docs/planning/{page}.md" for page in ("distributed", "fit", "long-context", "paper-sizes"))  # many steps
WITH_SNIPPETS = [
    pytest.param(page, marks=[pytest.mark.thorough] * (name(page) in LONG), id=name(page))
    for page in PAGES
    if blocks(page, "python")
]
LORA_A = "base_model.model.roberta.encoder.layer.0.attention.self.query.lora_A.default"
WITHOUT_SKETCHES = ("docs/planning/compile.md", "docs/planning/distributed.md", "docs/planning/graphs.md")
WITHOUT_SKETCHES += ("docs/planning/tiles.md",)
# PyTorch 2.6 does not run fully_shard on CPU, nor trace whole models of a newer transformers, nor ask other solvers.
_NEWER = ("fullgraph=True", "fully_shard", "compile_budget", "KnapsackSolver", "config.activation")
IS_OLD = torch.__version__.startswith("2.6.")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to run in."""
    monkeypatch.chdir(tmp_path)
    # Inductor would compile for a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield tmp_path
    with contextlib.suppress(ValueError, AssertionError):  # a snippet may have failed before it did this itself
        torch.distributed.destroy_process_group()


def run(page, **given):
    """Run the page's snippets and return its names; every backward pass must have reached sketched layers."""
    names = {"__name__": name(page), **given}
    for number, snippet in enumerate(blocks(page, "python"), start=1):
        if IS_OLD and any(word in snippet for word in _NEWER):
            continue
        before = gradients(names)
        exec(compile(snippet, f"{name(page)}, snippet {number}", "exec"), names)
        if ".backward()" in snippet and name(page) not in WITHOUT_SKETCHES:
            # Not of all layers: in the last block, few tokens reach the loss, and sampled rows may miss them.
            after = {
                key: found for key, found in gradients(names).items() if not found.equal(before.get(key, found * 0))
            }
            assert after, snippet
            assert all(found.isfinite().all() for found in after.values()), snippet
    return names


def gradients(names):
    """Return a copy of the weight gradient of every sketched layer, and of tensors that are no model's."""
    found = {}
    for value in list(names.values()):
        for item in value if isinstance(value, list) else [value]:
            tensors = [item] if type(item) is torch.Tensor and item.is_leaf else []
            if isinstance(item, nn.Module):
                named = item.named_modules()  # heads see few rows, so they are exact
                tensors = [m.weight for name, m in named if isinstance(m, RMMLinear) and "classifier" not in name]
            for tensor in tensors:
                if tensor.grad is not None:
                    gradient = tensor.grad
                    found[id(tensor)] = getattr(gradient, "_local_tensor", gradient).clone()
    return found


# What a page prints, as patterns of lines, and what holds of its names afterwards.
CONVERTED = r"^rmm_linear: converted=14 "
FIT = r"^rmm_linear fit: "
PRINTS = {
    "README.md": [
        r"^rmm_linear: converted=\d+ .* logits=1\b",
        r"^rmm_linear: saved for backward: .* MiB \(\d+%\)",
        FIT,
    ],
    "docs/use.md": [CONVERTED + r"norm=5 "],
    "docs/index.md": [CONVERTED],
    "docs/blocks.md": [
        r"^rmm_linear: (?=.* activation=)(?=.* norm=)(?=.* attention=).* dropout=",
        r"^\| whole gradient ",
    ],
    "docs/kinds.md": ["kind=countsketch,", "kind=rademacher,", "kind=wta,"],
    "docs/noise.md": [r"^tensor\(", r"^\| whole gradient "],
    "docs/estimators.md": ["'classifier.dense': 0"],
    "docs/planning/chains.md": [r"nats per character$", r"^\| memory ", r"saves \d+ of 41 outputs"],
    "docs/planning/sweep.md": [r"^sweep: steps=200 .* interval=None ", r"^sweep: steps=1\d\d .* interval=20 stored="],
    "docs/planning/graphs.md": [r"^\| roberta.encoder.layer.[0{]"],
    "docs/planning/fit.md": [FIT],
    "docs/planning/long-context.md": [r"^rmm_linear max_length: length=\d+ .* budget=100 MB \(95.4 MiB\)$"],
    "docs/planning/distributed.md": [
        r"rmm_linear fit: peak=.* budget=",
        r"their time is not known for a sharded model",
        r"^Shards\(stages=2, microbatches=8\) rmm_linear: peak=",
    ],
    "docs/planning/compile.md": [r"^rmm_linear fit: peak="],
    "docs/planning/tiles.md": [r"^rmm_linear: tiled=7 norms=5 ", r"^peak: "],
    "docs/planning/paper-sizes.md": [FIT],
    "docs/training-stack.md": [r"^rmm_linear: converted=4 frozen=14 skipped=4 "],
}


def check_use(names, out, place):
    dense = names["model"].roberta.encoder.layer[0].output.dense
    assert isinstance(dense, RMMLinear)
    assert dense.rmm_config.ratio == 0.2
    assert RMMConfig.load(place / "rmm_config.json").overrides == {"output.dense": {"ratio": 0.2}}
    assert names["saved"].total == names["explanation"].after < names["explanation"].before


def check_noise(names, out, place):
    assert abs(names["simulation"].z_score(float(names["noise"] * names["minibatch"]))) < 4
    with (place / "variance.csv").open(newline="") as file:
        assert {int(line["step"]) for line in csv.DictReader(file)} == {2, 4}
    assert list(names["watch"].whole) == [4]
    assert "4,roberta.encoder.layer.0,norm," in (place / "whole.csv").read_text()


def check_chains(names, out, place):
    first, last = (float(number) for number in re.findall(r"step +\d+: (\d+\.\d+) nats per character", out)[::9])
    assert last < 0.8 * first < 4
    assert names["plan"].bytes <= 200_000 < 0.06 * 200 * names["plan"].plain_bytes
    assert names["measured"].bytes < 1.2 * names["chain_plan"].peak < 0.5 * sum(names["sizes"])


def check_sweep(names, out, place):
    """The initial state is found as well as heat lets one: what it smooths away in 200 steps is lost."""
    assert float(out.splitlines()[0].partition(" ")[2]) < 0.05
    assert f"forward_steps={200 + recomputed(200, 6)} (4.40 per step)" in out
    assert list((place / "states").iterdir()) == []


def check_graphs(names, out, place):
    assert int(out.split()[0]) == names["peak"].bytes
    assert names["plan"].predicted <= 0.5 * names["plan"].plain
    assert names["graph_plan"].predicted <= 0.6 * names["graph_plan"].plain


def check_fit(names, out, place):
    assert names["report"].fits
    assert any(way.fits for way in names["full"].ways)
    assert names["found"].exact < names["found"].checkpointed <= names["found"].batch


def check_tiles(names, out, place):
    assert names["tiled"] < 0.7 * names["plain"]
    assert not any("forward" in vars(part) for part in names["model"].modules())


def check_training_stack(names, out, place):
    assert isinstance(names["lora"].get_submodule(LORA_A), RMMLinear)
    assert isinstance(names["again"].roberta.encoder.layer[0].output.dense, RMMLinear)
    exact = RobertaForSequenceClassification.from_pretrained(place / "out" / "model")
    assert all(map(torch.equal, exact.parameters(), names["model"].parameters()))


CHECKS = {
    "docs/use.md": check_use,
    "docs/noise.md": check_noise,
    "docs/planning/chains.md": check_chains,
    "docs/planning/sweep.md": check_sweep,
    "docs/planning/fit.md": check_fit,
    "docs/planning/tiles.md": check_tiles,
    "docs/planning/graphs.md": check_graphs,
    "docs/training-stack.md": check_training_stack,
}


@pytest.fixture
def model_of_a_hub(monkeypatch):
    """Make small what README takes from a hub and from its reader: a language model, texts, the Trainer's steps."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=500)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda named: LlamaForCausalLM(config))
    quick = functools.partial(TrainingArguments, max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    monkeypatch.setattr("transformers.TrainingArguments", quick)
    ids = torch.randint(3, 500, (8, 128))
    return {"ids": ids, "dataset": [{"input_ids": row, "labels": row} for row in ids]}


@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_snippets_of_a_page_run_in_order_and_do_what_it_says(page, place, capsys, model_of_a_hub):
    names = run(page, **(model_of_a_hub if name(page) == "README.md" else {}))
    out = capsys.readouterr().out
    for pattern in PRINTS[name(page)]:
        assert re.search(pattern, out, flags=re.MULTILINE), f"{pattern} in\n{out}"
    if name(page) in CHECKS:
        CHECKS[name(page)](names, out, place)

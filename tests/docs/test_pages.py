"""The snippets of every page run by themselves, in order, and do what the page says."""

import ast
import contextlib
import csv
import functools
import json
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

from rmm_linear import RMMConfig, RMMLinear, sketch_state
from rmm_linear.memory import track_saved
from rmm_linear.planning.chains.schedules import recomputed
from rmm_linear.variance import sketch_variance

WITH_SNIPPETS = [page for page in PAGES if blocks(page, "python")]
LORA_A = "base_model.model.roberta.encoder.layer.0.attention.self.query.lora_A.default"
WITHOUT_SKETCHES = ("docs/planning/graphs.md",)
# PyTorch 2.6 does not run fully_shard on CPU, nor trace whole models of a newer transformers.
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
        if IS_OLD and ("fullgraph=True" in snippet or "fully_shard" in snippet):
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


def check_readme(names, out, place):
    """The callback has converted, one call undid it, and a plan for the same model fits."""
    lines = [line for line in out.splitlines() if line.startswith("rmm_linear")]
    assert re.match(r"rmm_linear: converted=\d+ attention=2 activation=2 norm=5 logits=1 ", lines[0])
    assert re.match(r"rmm_linear: saved for backward: .* MiB \(\d+%\)", lines[1])
    assert lines[-1].startswith("rmm_linear fit: ")
    assert names["trainer"].state.global_step == 2
    assert len(names["report"].converted) == 14


def check_use(names, out, place):
    first = r"rmm_linear: converted=14 norm=5 .* skipped=0 frozen=0 kind=countsketch memory=0\.1 bits=auto "
    assert re.match(first, out)
    dense = names["model"].roberta.encoder.layer[0].output.dense
    assert isinstance(dense, RMMLinear)
    assert dense.rmm_config.ratio == 0.2
    assert names["report"].skipped == {
        "classifier.dense": "in exclude_modules",
        "classifier.out_proj": "not in target_modules",
    }
    saved = RMMConfig.load(place / "rmm_config.json")
    assert saved.overrides == {"output.dense": {"ratio": 0.2}}
    assert saved.target_modules == ("query", "key", "value", "dense")
    layer, x = names["layer"], names["x"]
    with track_saved(layer) as ledger:
        output = layer(x)
    assert ledger.by_module[""] == 410 * 256 * 4 + 8  # the rows, and the seed
    assert torch.equal(output, nn.functional.linear(x, layer.weight, layer.bias))
    check_estimate(names["weight"].grad, x.reshape(-1, 256), torch.ones(32 * 128, 64), names["config"])
    assert names["saved"].total == names["explanation"].after < names["explanation"].before


def check_estimate(gradient, x, y, config):
    """The squared error is that of the closed form, up to the spread of one estimate of 256 columns; zeros have 0.1."""
    error = (gradient - y.T @ x).double().square().sum()
    variance = sketch_variance(x, y, kind=config.kind, rows=410)
    assert (y.T @ x).double().square().sum() < 0.3 * variance
    assert 0.5 < error / variance < 2


def check_index(names, out, place):
    assert out.startswith("rmm_linear: converted=14 ")
    assert len(names["report"].converted) == 14
    assert not any(isinstance(module, RMMLinear) for module in names["model"].modules())


def check_blocks(names, out, place):
    summaries = [line for line in out.splitlines() if line.startswith("rmm_linear: ")]
    assert all(f" {operation}=" in summaries[0] for operation in ("activation", "norm", "attention", "dropout"))
    assert {entry.operation for entry in names["report"].packed.values()} == {"norm"}
    assert f"\n{names['fused'].unfused}\n" in out
    assert all(entry.saved == "its rows, 4 bits" for entry in names["report"].packed.values())
    assert "| whole gradient " in out
    assert not any("Packed" in type(module).__name__ for module in names["model"].modules())


def check_kinds(names, out, place):
    assert [layer.rmm_config for layer in names["layers"]] == names["configs"]
    assert [line.partition("kind=")[2].partition(",")[0] for line in out.splitlines()] == [
        "countsketch",
        "rademacher",
        "wta",
    ]


def check_noise(names, out, place):
    assert out.startswith("tensor(")
    variance = float(names["noise"] * names["minibatch"])
    assert abs(names["simulation"].z_score(variance)) < 4
    assert names["simulation"].standard_error < 0.1 * variance
    rows = names["probe"].rows
    assert {row.step for row in rows} == {2, 4}
    with (place / "variance.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(int(line["step"]), line["module"]) for line in written] == [(row.step, row.module) for row in rows]
    assert all(0 < float(line["noise"]) < 10 for line in written if line["tokens"] == "512")
    assert list(names["watch"].whole) == [4]
    assert "| whole gradient " in out
    assert "4,roberta.encoder.layer.0,norm," in (place / "whole.csv").read_text()
    assert names["callback"] in names["trainer"].callback_handler.callbacks


def check_estimators(names, out, place):
    learned = ast.literal_eval(out.splitlines()[0])
    assert {layer for layer, count in learned.items() if count == 0} == {"classifier.dense", "classifier.out_proj"}
    state = json.loads((place / "sketch_state.json").read_text())
    assert set(state["norm_estimators"].values()) == {"sample_cache"}
    dense = names["model"].roberta.encoder.layer[0].output.dense
    assert isinstance(dense.rmm_estimator, names["Decaying"])


def check_sweep(names, out, place):
    """The initial state is found as well as heat lets one: what it smooths away in 200 steps is lost."""
    error, fixed, adaptive = out.splitlines()
    assert float(error.partition(" ")[2]) < 0.05
    forward_steps = 200 + recomputed(200, 6)
    assert fixed.startswith(f"sweep: steps=200 forward_steps={forward_steps} (4.40 per step) interval=None ")
    found = re.match(r"sweep: steps=(\d+) forward_steps=\d+ \((\S+) per step\) interval=20 stored=(\d+) ", adaptive)
    assert 100 < int(found[1]) < 200
    assert int(found[3]) == (int(found[1]) - 1) // 20
    assert float(found[2]) < 3.8
    assert list((place / "states").iterdir()) == []


def check_training_stack(names, out, place):
    # Adapters of two query and two value layers.
    assert re.match(r"rmm_linear: converted=22 .* skipped=0 frozen=14 ", out)
    assert isinstance(names["lora"].get_submodule(LORA_A), RMMLinear)
    again = names["again"].roberta.encoder.layer[0].output.dense
    assert isinstance(again, RMMLinear)
    saved = names["model"].roberta.encoder.layer[0].output.dense.rmm_config
    assert again.rmm_config == saved.replace(checkpointed="packed")
    folder = place / "out" / "model"
    assert RMMConfig.load(folder / "rmm_config.json") == RMMConfig()
    exact = RobertaForSequenceClassification.from_pretrained(folder)
    for (key, found), expected in zip(exact.named_parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(found, expected), key
    chosen = [layer["bits"] for layer in sketch_state(names["mixed"])["layers"].values()]
    assert sum(bits in (2, 4, 8) for bits in chosen) == 12  # of the layers that see tokens


def check_chains(names, out, place):
    first, last = (float(number) for number in re.findall(r"step +\d+: (\d+\.\d+) nats per character", out)[::9])
    assert 3.5 < first < 5
    assert last < 0.8 * first
    plan = names["plan"]
    assert plan.steps == 200
    assert plan.bytes <= 200_000 < 0.06 * 200 * plan.plain_bytes
    assert f"{plan.forward_steps:,}" in out
    assert "| memory " in out
    assert (place / "plan.png").stat().st_size > 1000
    chain = names["chain_plan"]
    assert f"saves {len(chain.kept)} of 41 outputs" in out
    assert names["measured"].bytes < 1.2 * chain.peak < 0.5 * sum(names["sizes"])


def check_graphs(names, out, place):
    assert int(out.split()[0]) == names["peak"].bytes
    assert names["plan"].predicted <= 0.5 * names["plan"].plain
    assert "| roberta.encoder.layer.0 " in out
    assert (place / "plan.json").is_file()
    assert names["graph_plan"].predicted <= 0.6 * names["graph_plan"].plain
    for each in (names["model"], names["network"]):
        gradients = [parameter.grad for parameter in each.parameters() if parameter.requires_grad]
        assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients) > len(gradients) // 2


def check_fit(names, out, place):
    assert names["report"].fits
    assert names["found"].exact < names["found"].checkpointed <= names["found"].batch
    assert out.count("rmm_linear fit: ") == 2
    assert names["large"].roberta.embeddings.word_embeddings.weight.is_meta


def check_paper_sizes(names, out, place):
    report = names["report"]
    assert report.fits
    assert report.measured_peak is None
    assert report.static.gathered > 0
    assert out.startswith("rmm_linear fit: ")
    assert all(parameter.is_meta for parameter in names["model"].parameters())


CHECKS = {
    "README.md": check_readme,
    "docs/use.md": check_use,
    "docs/blocks.md": check_blocks,
    "docs/estimators.md": check_estimators,
    "docs/index.md": check_index,
    "docs/kinds.md": check_kinds,
    "docs/noise.md": check_noise,
    "docs/planning/chains.md": check_chains,
    "docs/planning/sweep.md": check_sweep,
    "docs/planning/fit.md": check_fit,
    "docs/planning/graphs.md": check_graphs,
    "docs/planning/paper-sizes.md": check_paper_sizes,
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


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=name)
def test_snippets_of_a_page_run_in_order_and_do_what_it_says(page, place, capsys, model_of_a_hub):
    names = run(page, **(model_of_a_hub if name(page) == "README.md" else {}))
    CHECKS[name(page)](names, capsys.readouterr().out, place)

"""Adapters of the comparison: a base in 4 bits, the noise of variants, the tables, and PEFT's suite on a tiny model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from frontier_helpers import noisy, point
from helpers import tiny_model, token_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.__main__ import main
from benchmarks.frontier.adapters import has_variants, quantize, variant_noise
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.rows import Cost
from benchmarks.pages.frontier_noise import TABLES
from benchmarks.peft.small import load_local, questions, save_tiny
from benchmarks.records import write_rows
from rmm_linear import RMMConfig
from rmm_linear.memory import track_saved
from rmm_linear.variance import gradient_noise

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")
SUITE = os.environ.get("PEFT_SUITE", "")


def base() -> Any:
    torch.manual_seed(0)
    return tiny_model("llama", width=64, dropout=0.0).train()


def batch() -> dict[str, Any]:
    ids = token_ids(8, 20)
    return {"input_ids": ids, "labels": ids}


def test_a_base_in_4_bits_is_trained_through_and_evaluations_leave_it_as_it_is() -> None:
    exact, made = base(), base()
    quantize(made)
    names = [name for name, one in made.named_modules() if type(one).__name__ == "Linear4bit"]
    assert len(names) == 14  # seven in each of two layers, and not the head
    weights = made.get_submodule(names[0]).weight
    assert weights.nbytes == exact.get_submodule(names[0]).weight.numel() / 2
    loss = made(**batch()).loss
    assert 0 < abs(float((loss - exact(**batch()).loss).detach())) < 0.1
    before = weights.clone()
    made.eval()
    with torch.no_grad():
        made(**batch())
    assert torch.equal(made.get_submodule(names[0]).weight, before)


def test_methods_for_quantized_bases_keep_less_and_train_adapters_alone() -> None:
    kept = dict[str, int]()
    for method in ("qlora", "qlora-tenth", "lora-smallest"):
        model = METHODS[method].prepare(base())
        with track_saved(model) as ledger:
            loss = model(**batch()).loss
        kept[method] = ledger.total
        loss.backward()
        found = [name for name, one in model.named_parameters() if one.grad is not None]
        assert found
        assert all("lora_" in name for name in found)
    assert kept["qlora-tenth"] < kept["qlora"] / 2
    assert kept["lora-smallest"] < kept["qlora"] / 2


def test_the_noise_of_variants_is_that_of_their_gradients() -> None:
    """Of our variant it is about that of a converted model, whose codes are of several layers; VeLoRA has no draws."""
    inner = base()
    model = METHODS["lora-sketched"].prepare(inner)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_(std=0.05)
    assert has_variants(inner)
    ((noise, sgd),) = variant_noise(inner, batch(), 4).values()
    variants = [one for one in inner.modules() if getattr(one, "lora_variant", None)]
    assert len(variants) == 14  # given back
    plain = METHODS["lora"].prepare(base())
    plain.load_state_dict(model.state_dict())
    found = gradient_noise(plain, batch(), RMMConfig(operations=("linear",)), draws=4)
    expected = sum(value for name, value in found.stand_ins["linear"].items() if "lora_A" in name)
    assert sgd == pytest.approx(sum(found.sgd.values()), rel=1e-5)
    assert expected / 4 < noise < 4 * expected
    other = base()
    assert not has_variants(other)
    METHODS["velora"].prepare(other)
    first, second = (variant_noise(other, batch(), draws) for draws in (1, 3))
    assert first == {key: pytest.approx(value) for key, value in second.items()}


def test_the_table_of_adapters_compares_with_plain_lora(tmp_path: Path) -> None:
    def row(study: str, method: str, loss: float, seed: int) -> Any:
        fields = {"study": study, "method": method, "seed": seed}
        return type(one := point(method, 8, loss, step=200))(**{**vars(one), **fields})

    points = [row("base", "exact", 5.0, 0)]
    points += [row("adapters", "lora", 4.0 + seed, seed) for seed in (0, 1)]
    points += [row("adapters", "lora-tenth", 4.1 + 1.2 * seed, seed) for seed in (0, 1)]
    noise = noisy(1.0)
    write_rows(tmp_path / "frontier-curves.csv", points)
    write_rows(
        tmp_path / "frontier-noise.csv", [type(noise)(**{**vars(noise), "study": "adapters", "method": "lora-tenth"})]
    )
    costs = [Cost(task="adapters", method=one, saved=size, time=1.0) for one, size in (("lora", 80), ("lora-tenth", 8))]
    write_rows(tmp_path / "frontier-cost.csv", costs)
    lines = [line.split("|")[1:-1] for line in TABLES["frontier-adapters"](tmp_path).splitlines()[2:]]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells[0][4:] == ["5.0000", "", "", "1"]
    assert cells[1][1:] == ["100 %", "", "1.00", "4.5000 ± 0.5000", "", "", "2"]
    assert cells[2][1:] == ["10 %", "", "1.00", "4.7000 ± 0.6000", "+0.2000 ± 0.1000", "0.5", "2"]


def test_local_questions_and_model_are_what_the_suite_reads(tmp_path: Path) -> None:
    metamath, gsm8k = load_local("meta-math/MetaMathQA")["train"], load_local("openai/gsm8k", "main")
    assert {"type", "query", "original_question", "response"} == {*metamath.column_names}
    assert {"question", "answer"} == {*gsm8k["train"].column_names} == {*gsm8k["test"].column_names}
    assert "The answer is: " in metamath[0]["response"]
    assert "#### " in gsm8k["test"][0]["answer"]
    assert questions(3, 0) == questions(3, 0) != questions(3, 1)
    save_tiny(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    text = metamath[0]["query"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    assert 0.5 < float(model(input_ids=ids, labels=ids).loss.detach()) < 2


def test_a_suite_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peft", "--suite", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "--suite needs a checkout of github.com/huggingface/peft" in capsys.readouterr().err


@pytest.mark.skipif(not SUITE, reason="needs PEFT_SUITE=CHECKOUT/method_comparison/MetaMathQA")
def test_the_suite_itself_runs_the_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peft", "--suite", SUITE, "--out", str(tmp_path)]) == 0
    found = json.loads(Path(capsys.readouterr().out.splitlines()[-1]).read_text())
    assert found["train_info"]["status"] == "success"
    assert found["train_info"]["accelerator_memory_max"] > 0
    assert found["run_info"]["peft_config"]["sketch_config"]["bits"] == 4
    assert {"train loss", "tokens / sec", "valid accuracy"} <= {*found["train_info"]["metrics"][0]}

"""Models without fused attention count with flex attention: no scores of all pairs, and a report that says so."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from rmm_linear.command import longest
from rmm_linear.command.flex import NAME, counted_as_trained
from rmm_linear.command.main import main
from rmm_linear.command.methods import for_training
from rmm_linear.fitting.longest import LongestSequence
from rmm_linear.planning import simulate
from rmm_linear.planning.step.flops import count_flops

CONFIG = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 64}


def made() -> GptOssForCausalLM:
    with torch.device("meta"):
        return GptOssForCausalLM._from_config(GptOssConfig(**CONFIG, use_cache=False), dtype=torch.bfloat16).train()


def grown(model: GptOssForCausalLM, measured) -> float:
    """Return how much a number grows when the sequence is twice as long."""
    found = []
    for length in (4096, 8192):
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        found.append(measured(model, {"input_ids": ids, "labels": ids}))
    return found[1] / found[0]


def test_attention_with_sinks_takes_a_line_of_the_length():
    model = made()
    assert grown(model, lambda *step: simulate(*step).bytes) > 3.5
    assert [note.partition(".")[0] for note in counted_as_trained(model)] == [
        "GptOssForCausalLM has no fused attention"
    ]
    assert model.config._attn_implementation == NAME
    assert grown(model, lambda *step: simulate(*step).bytes) == pytest.approx(2, rel=0.05)
    assert grown(model, count_flops) > 2.5  # pairs are operations all the same
    assert counted_as_trained(model) == []


def test_the_command_says_how_it_counts_and_what_stays_in_16_bits(tmp_path, capsys, monkeypatch):
    counted = LongestSequence(64, 64, 64, 1, None, 0, 10**6, notes=("Another one.",))
    monkeypatch.setattr(longest, "max_length", lambda *_, **__: counted)
    GptOssConfig(**CONFIG, architectures=["GptOssForCausalLM"]).save_pretrained(tmp_path)
    main(["longest", str(tmp_path), "--memory", "20MB", "--method", "qlora", "--rank", "2"])
    out = " ".join(capsys.readouterr().out.split())
    assert 'attn_implementation="flex_attention"' in out
    assert "of experts stay in 16 bits" in out
    assert "Another one." in out


def test_other_models_are_left_alone():
    model = for_training(made(), "lora", rank=2, dtype="bfloat16")
    model.set_attn_implementation("flex_attention")
    assert counted_as_trained(model) == []
    assert counted_as_trained(GptOssForCausalLM(GptOssConfig(**CONFIG))) == []

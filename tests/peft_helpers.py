"""Tiny models under LoRA, for the tests with PEFT."""

import warnings

import torch
from cases import ROUGH_BODY
from helpers import tiny_model
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what PEFT imports
    from peft import LoraConfig, get_peft_model

WTA = {**ROUGH_BODY, "kind": "wta"}
TARGETS = {
    "roberta": ["query", "value", "output.dense"],
    "bert": ["query", "value", "output.dense"],
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
    "vit": ["q_proj", "v_proj", "query", "value", "fc2"],  # by the newer and the older names of their class
    "t5": ["q", "v", "wo"],
}
FAMILY = {"roberta": "SEQ_CLS", "bert": "SEQ_CLS", "gpt2": "CAUSAL_LM", "llama": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}
ROWS, HIDDEN, RANK = 20, 16, 4


def lora(architecture, base=None, layers=2):
    """A tiny model under LoRA without dropout, the same adapters every time; B is not zero, so that A learns."""
    model = base or tiny_model(architecture, dropout=0.0, layers=layers)
    config = LoraConfig(
        r=RANK,
        target_modules=TARGETS[architecture],
        task_type=FAMILY.get(architecture),
        fan_in_fan_out=architecture == "gpt2",
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.train()

"""Gated MLPs of transformers, and one without a home, for the tests of packed ones."""

import torch
import transformers as hf
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

WIDTH, HIDDEN = 16, 70


def _sizes(width):
    return {"hidden_size": width, "intermediate_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2}


class Experts(nn.Module):
    """The names of Mixtral's experts, the second factor first, and ReLU."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, HIDDEN), nn.Linear(width, HIDDEN)
        self.w2, self.act = nn.Linear(HIDDEN, width), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.w2(self.w3(x) * self.act(self.w1(x)))


MAKERS = {
    "llama": lambda width=WIDTH: LlamaMLP(hf.LlamaConfig(**_sizes(width))),
    "qwen2": lambda width=WIDTH: Qwen2MLP(hf.Qwen2Config(**_sizes(width))),
    "mistral": lambda width=WIDTH: MistralMLP(hf.MistralConfig(**_sizes(width))),
    "gemma": lambda width=WIDTH: GemmaMLP(hf.GemmaConfig(**_sizes(width))),
    "phi3": lambda width=WIDTH: Phi3MLP(hf.Phi3Config(**_sizes(width), pad_token_id=0)),
    "t5": lambda width=WIDTH: T5DenseGatedActDense(
        hf.T5Config(d_model=width, d_ff=HIDDEN, feed_forward_proj="gated-gelu", dropout_rate=0.3)
    ),
    "experts": Experts,
}


class Model(nn.Module):
    """One MLP, called with a mask as a model is."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x, attention_mask=None):
        return self.mlp(x)


def made(name, dtype=torch.float32):
    """The MLP in a model, with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Model(MAKERS[name]()).to(dtype)


def randn(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

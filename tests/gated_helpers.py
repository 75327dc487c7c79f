"""Gated MLPs of transformers, and one without a home, for the tests of packed ones."""

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
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


class Functional(nn.Module):
    """An MLP that calls a function as its activation, and reads both factors from one layer."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 2 * HIDDEN), nn.Linear(HIDDEN, width, bias=False)

    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(up * F.gelu(gate))


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
    "lfm2": lambda width=WIDTH: Lfm2MLP(
        hf.Lfm2Config(hidden_size=width, intermediate_size=HIDDEN, block_auto_adjust_ff_dim=False)
    ),
    "functional": Functional,
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

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

from rmm_linear import RMMConfig
from rmm_linear.activations.base import packed_class
from rmm_linear.activations.gated import PackedGatedMLP
from rmm_linear.context.model_context import ModelContext

WIDTH, HIDDEN = 16, 70
_SIZES = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": 2, "num_key_value_heads": 2}
_T5 = {"d_model": WIDTH, "d_ff": HIDDEN, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.3}


class Experts(nn.Module):
    """The names of Mixtral's experts, the second factor first, and ReLU."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.w2, self.act = nn.Linear(HIDDEN, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.w2(self.w3(x) * self.act(self.w1(x)))


MAKERS = {
    "llama": lambda: LlamaMLP(hf.LlamaConfig(**_SIZES)),
    "qwen2": lambda: Qwen2MLP(hf.Qwen2Config(**_SIZES)),
    "mistral": lambda: MistralMLP(hf.MistralConfig(**_SIZES)),
    "gemma": lambda: GemmaMLP(hf.GemmaConfig(**_SIZES)),
    "phi3": lambda: Phi3MLP(hf.Phi3Config(**_SIZES, pad_token_id=0)),
    "t5": lambda: T5DenseGatedActDense(hf.T5Config(**_T5)),
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


def packed(model, config=None, context=True):
    """The same model with its MLP packed."""
    shared = ModelContext(["mlp"]) if context else None
    model.mlp.__class__ = packed_class(PackedGatedMLP, type(model.mlp))
    model.mlp._set_up(config or RMMConfig(), shared, 0)
    if shared is not None:
        shared.attach(model)
    return model


def randn(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

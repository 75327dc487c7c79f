"""The table of converted modules: how each is made, what it saves, which of its gradients are exact."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import own_modules as own
import torch
import transformers as hf
from channel_cases import CHANNEL_NORMS, POOLS
from gated_helpers import HIDDEN
from gated_helpers import MAKERS as GATED
from own_modules import OUTPUTS, Images, Own, OwnGate, OwnParameter, OwnProduct
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from rmm_linear import RMMConfig, convert
from rmm_linear.sketches import KINDS, SAMPLERS, has_blocks

WIDTH, TOKENS, SEQUENCES = 96, 20, 3
RATIO = 0.25
CHOICES = 2  # experts of a token


@dataclass(frozen=True)
class Member:
    """A module that is converted.

    Attributes:
        operation: The operation of ``RMMConfig.operations`` that it belongs to.
        make: Makes the exact module for inputs of a width.
        saved: Bytes that are saved of float32 inputs, given the rows that are stored, all rows, and the width.
        exact: Names of the gradients that are exact; all others are random.
        fields: Fields of ``RMMConfig``.
        frozen: Whether its bytes are counted with frozen parameters, as other modules in it save inputs for theirs.
        masked: Whether the module is given the mask of the tokens.
        near: How far the output in training may be from the exact one, relative to its largest element.
        bias: Bound on the squared bias of the gradients, relative to their variance.
    """

    operation: str
    make: Callable[[int], nn.Module]
    saved: Callable[[int, int, int], int]
    exact: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    frozen: bool = False
    masked: bool = False
    near: float = 0.0
    bias: float = 0.0


class Host(nn.Module):
    """A model of one module, whose input is a ``change`` of that of the model."""

    def __init__(self, module: nn.Module, masked: bool = False) -> None:
        super().__init__()
        self.module, self.masked, self.state, self.change = module, masked, None, torch.clone

    def forward(self, x, attention_mask=None):
        x = self.change(x)
        output = self.module(x, attention_mask) if self.masked else self.module(x)
        if not torch.compiler.is_compiling():
            self.state = torch.get_rng_state()  # of the generator, where the next module would draw
        return output


def exact_model(name, width=WIDTH, dtype=torch.float32):
    """The model before it is converted, with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Host(MEMBERS[name].make(width), MEMBERS[name].masked)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(dtype).train()


def converted_model(name, width=WIDTH, dtype=torch.float32, **fields):
    model, member = exact_model(name, width, dtype), MEMBERS[name]
    how = {"operations": member.operation, "min_rows": 1, "checkpointed": "packed", **member.fields, **fields}
    convert(model, RMMConfig(**how))
    return model


# Bytes. What an operator makes is one tensor, with every part of it at a multiple of 16.


def aligned(*parts):
    return sum(-(-part // 16) * 16 for part in parts)


def codes(rows, columns, bits):
    """A plane for all bits, or one for 2 of 3 and one for the third."""
    return rows * sum(math.ceil(columns * width / 8) for width in ((2, 1) if bits == 3 else (bits,)))


def scales(rows, columns):
    """A byte for every group of 64 columns."""
    return rows * math.ceil(columns / 64)


def linear_bytes(kind, bits):
    def saved(stored, rows, width):
        kept = round(RATIO * rows)
        if bits == 2:  # a normal code, of groups of 128 columns
            size = kept * -(-width // 128) * 33
        else:
            size = kept * width * 4 if bits is None else codes(kept, width, bits) + scales(kept, width)
        return size + (8 if bits is not None or kind not in SAMPLERS else 0) + (8 * kept if kind in SAMPLERS else 0)

    return saved


def every_row_bytes(bits, bits_with_padding):
    """Of every valid row, in wider codes where padding makes room for them."""

    def saved(stored, rows, width):
        taken = bits if stored == rows else bits_with_padding
        return codes(stored, width, taken) + scales(stored, width) + 8

    return saved


def pointwise_bytes(bits, seeded=True, scaled=False):
    def saved(stored, rows, width):
        parts = [codes(stored, width, bits), 8 * seeded, scales(stored, width) * scaled]
        return aligned(*parts)

    return saved


def norm_bytes(bits):
    return lambda stored, rows, width: aligned(8, 4 * stored, codes(stored, width, bits), scales(stored, width))


def gated_bytes(bits):
    return lambda stored, rows, width: aligned(16, *[codes(stored, HIDDEN, bits), scales(stored, HIDDEN)] * 2)


def attention_bytes(bits, heads=(4, 4), dropout=False, hidden=False, more=0):
    """``hidden``: padding is hidden from all valid tokens, so that keys leave too; ``more``: what else it reads."""

    def saved(stored, rows, width):
        queries, keys = (width // 3 * one // 4 for one in heads)
        kept = stored if hidden else rows
        parts = [(stored, queries), (kept, keys), (kept, keys)]
        size = aligned(24, *(part for shape in parts for part in (codes(*shape, bits), scales(*shape))))
        return size + dropout * heads[0] * codes(stored, TOKENS, 1) + more

    return saved


def region_bytes(bits, heads=(4, 4), random=0, more=0):
    """Of every source by itself; ``random``: states of the generator from which dropout draws."""

    def saved(stored, rows, width):
        queries, keys = (width * one // 4 for one in heads)
        sources = (
            aligned(8, 4 * SEQUENCES * one, codes(rows, one, bits), scales(rows, one)) for one in (queries, keys, keys)
        )
        return sum(sources) + random * torch.get_rng_state().nbytes + more

    return saved


def convolution_bytes(bits):
    """Of all elements side by side, in rows of the largest power of two; of an image where that is no group."""

    def saved(stored, rows, width):
        columns = math.gcd(rows * width, 1024)
        shape = rows * width // (columns := columns if columns >= 64 else width), columns
        return aligned(8, codes(*shape, bits), scales(*shape))

    return saved


def own_bytes(bits):
    """Of all rows."""
    return lambda stored, rows, width: aligned(8, codes(rows, width, bits), scales(rows, width))


def scale_bytes(stored, rows, width):
    """Of the features for their scale, and of both factors."""
    return sum(own_bytes(bits)(stored, rows, width) for bits in (3, 4, 4))


def experts_bytes(stored, rows, width):
    """With frozen weights: the gate's derivative, and its output for the routing weights; the order and the routing."""
    each, (pairs, of_all) = ((2 * HIDDEN, 4), (HIDDEN, 3)), (CHOICES * stored, CHOICES * rows)
    size = aligned(
        24, *(part for columns, bits in each for part in (codes(pairs, columns, bits), scales(pairs, columns)))
    )
    return size + 4 * pairs + (8 + 4) * of_all


# Modules


class Attention(nn.Module):
    """Attention of q, k and v that lie side by side in the input."""

    def __init__(self, width, kv_heads=4, mask=None, **named):
        super().__init__()
        self.width, self.kv_heads, self.mask, self.named = width // 12, kv_heads, mask, named

    def forward(self, x, attention_mask=None):
        heads = x.unflatten(-1, (3, 4, self.width)).permute(2, 0, 3, 1, 4)
        q, k, v = heads[0], heads[1, :, : self.kv_heads], heads[2, :, : self.kv_heads]
        mask, named = self.mask, dict(self.named)
        if attention_mask is not None:
            mask = attention_mask.bool()[:, None, None].expand(-1, 1, x.shape[1], -1)
        elif mask is not None:
            mask = mask[: x.shape[0], :, : x.shape[1], : x.shape[1]]
            mask = mask.to(x.dtype) if mask.is_floating_point() else mask
        if not self.training:
            named.pop("dropout_p", None)
        return F.scaled_dot_product_attention(q, k, v, mask, **named).transpose(1, 2).flatten(2)


class First(nn.Module):
    """The first output of an attention of another library."""

    def __init__(self, attention, **named):
        super().__init__()
        self.attention, self.named = attention, named

    def forward(self, x):
        return self.attention(x, **self.named)[0]


class MultiHead(First):
    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Llama(First):
    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self.attention(x, self.named["rotary"](x, places), None)[0]


class Shaped(nn.Module):
    """A norm over two dimensions."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm((2, width // 2))

    def forward(self, x):
        return self.norm(x.unflatten(-1, self.norm.normalized_shape)).flatten(-2)


class Routed(nn.Module):
    """Experts with routing weights that the input decides; one of five gets few rows, and one none."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, 0, 0.2)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        place = torch.arange(rows.shape[0], device=x.device).unsqueeze(1)
        index = torch.cat((place % 2, 2 + (place % 7 == 0)), 1)
        return self.experts(rows, index, rows[:, :CHOICES].sigmoid()).view(x.shape)


def mixtral(width):
    return Routed(MixtralExperts(hf.MixtralConfig(**_experts_sizes(width))))


def gpt_oss(width):
    return Routed(GptOssExperts(hf.GptOssConfig(**_experts_sizes(width))))


def _experts_sizes(width):
    return {
        "hidden_size": width,
        "intermediate_size": HIDDEN,
        "num_local_experts": 5,
        "experts_implementation": "eager",
    }


def roberta(width, implementation="sdpa"):
    sizes = {"hidden_size": width, "num_attention_heads": 4, "attention_probs_dropout_prob": 0.3}
    return First(RobertaSelfAttention(hf.RobertaConfig(**sizes, attn_implementation=implementation)))


def llama(width, implementation="sdpa"):
    sizes = {"hidden_size": width, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**sizes, attn_implementation=implementation)
    return Llama(LlamaAttention(config, 0), rotary=LlamaRotaryEmbedding(config))


def t5(width, dropout=0.0, implementation="sdpa"):
    sizes = {"d_model": width, "d_kv": width // 4, "num_heads": 4, "dropout_rate": dropout}
    config = hf.T5Config(**sizes, attn_implementation=implementation)
    return First(T5Attention(config, has_relative_attention_bias=True))


def multihead(width):
    return MultiHead(nn.MultiheadAttention(width, 4, batch_first=True))


BOOL = torch.rand(3, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) > 0.3
ADDITIVE = torch.randn(1, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))
IN_PLACE = {"silu": nn.SiLU, "relu": nn.ReLU, "mish": nn.Mish, "hardswish": nn.Hardswish}
POINTWISE = {
    "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh"), "quick_gelu": lambda: ACT2FN["quick_gelu"],
    "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "elu": lambda: nn.ELU(1.5), "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "relu_squared": lambda: ACT2FN["relu2"], "hardtanh": nn.ReLU6, **IN_PLACE,
}  # fmt: skip
NORMS = {
    "layer": nn.LayerNorm, "rms": nn.RMSNorm, "no bias": lambda width: nn.LayerNorm(width, bias=False),
    "no affine": lambda width: nn.LayerNorm(width, elementwise_affine=False), "two dimensions": Shaped,
    "llama": LlamaRMSNorm, "t5": T5LayerNorm, "gemma": GemmaRMSNorm, "nemotron": NemotronLayerNorm1P,
}  # fmt: skip


def one_linear(width):
    return nn.Linear(width, OUTPUTS)


def _linear(kind, bits, make=one_linear, **fields):
    exact = "x", "module.bias"
    return Member(
        "linear", make, linear_bytes(kind, bits), exact, {"kind": kind, "bits": bits, "ratio": RATIO, **fields}
    )


def _pointwise(name, make, bits=4):
    is_exact, scaled = name in ("relu", "leaky_relu", "hardtanh"), name == "relu_squared"
    saved = pointwise_bytes(1 if is_exact else bits, not is_exact, scaled)
    return Member("activation", lambda width: make(), saved, ("x",) * is_exact, {"activation_bits": bits})


def _gated(make, bits=4):
    return Member("activation", make, gated_bytes(bits), AFTER, {"activation_bits": bits}, frozen=True)


def _attention(bits=4, heads=(4, 4), dropout=False, more=0, bias=1e-3, **named):
    """The bias is the documented one of scores with a deviation of 1, at 4 bits."""
    near = 4 * TOKENS * torch.finfo(torch.float32).eps * dropout  # with dropout, scores are summed in another order
    make = lambda width: Attention(width, heads[1], **named)  # noqa: E731
    saved = attention_bytes(bits, heads, dropout, "is_causal" in named, more)  # a causal one hides padding at the end
    return Member("attention", make, saved, (), {"attention_bits": bits}, near=near, bias=bias)


def _region(make, exact=(), bits=4, **named):
    """A module whose attention runs again in the backward pass."""
    exact = tuple(f"module.attention.{name}" for name in exact)
    run = lambda width: make(width, implementation="eager")  # noqa: E731
    return Member("attention", run, region_bytes(bits, **named), exact, {"attention_bits": bits}, True, bias=1e-3)


def _attending(make, exact=(), bias=1e-3, **named):
    """A module that projects its input, so that heads side by side are as wide as it is."""
    saved = lambda stored, rows, width: attention_bytes(4, **named)(stored, rows, 3 * width)  # noqa: E731
    near = 4 * TOKENS * torch.finfo(torch.float32).eps * named.get("dropout", False)
    exact = tuple(f"module.attention.{name}" for name in exact)
    return Member("attention", make, saved, exact, frozen=True, near=near, bias=bias)


def _convolution(axes, make, bits=3, more=0):
    exact, fields = ("x", "module.convolution.bias"), {} if bits == 3 else {"bits": bits}
    saved = lambda *sizes: convolution_bytes(bits)(*sizes) + more  # noqa: E731
    return Member("convolution", lambda width: Images(width, make, axes), saved, exact, fields)


AFTER = tuple(f"module.{name}" for name in ("down_proj.weight", "wo.weight", "w2.weight", "w2.bias"))  # the product
MEMBERS = {
    **{f"linear {kind}": _linear(kind, None) for kind in KINDS},
    **{f"linear countsketch {bits} bits": _linear("countsketch", bits) for bits in (8, 4, 3, 2)},
    **{f"linear {kind} 4 bits": _linear(kind, 4) for kind in SAMPLERS},
    **{f"linear {kind} blocks": _linear(kind, None, block=20) for kind in KINDS if has_blocks(kind)},
    "linear every row": Member("linear", one_linear, every_row_bytes(3, 3), ("x", "module.bias")),
    # 65 bytes for a row: 4 bits take 50. Of 60 rows 39 are valid, so there are 100 for one of these: 8 bits take 98.
    "linear memory": Member("linear", one_linear, every_row_bytes(4, 8), ("x", "module.bias"), {"memory": 0.17}),
    "linear without bias": _linear("countsketch", 4, lambda width: nn.Linear(width, OUTPUTS, bias=False)),
    "linear own code": Member("linear", OwnProduct, every_row_bytes(3, 3), ("x", "module.bias")),
    "linear own code matmul": Member("linear", own.OwnMatmul, own_bytes(3), ("x",)),
    "Conv1D": _linear("countsketch", None, lambda width: Conv1D(OUTPUTS, width)),
    "Conv1D 4 bits": _linear("countsketch", 4, lambda width: Conv1D(OUTPUTS, width)),
    **{f"activation {name}": _pointwise(name, make) for name, make in POINTWISE.items()},
    **{f"activation gelu {bits} bits": _pointwise("gelu", nn.GELU, bits) for bits in (8, 2, 1)},
    **{
        f"activation {name} in place": _pointwise(name, lambda make=make: make(inplace=True))
        for name, make in IN_PLACE.items()
    },
    "activation gelu_new": _pointwise("gelu_tanh", lambda: ACT2FN["gelu_new"]),
    **{
        f"gated {name}": _gated(make)
        for name, make in GATED.items()
        if name != "t5"
    },
    **{f"gated llama {bits} bits": _gated(GATED["llama"], bits) for bits in (8, 2)},
    "gated t5": Member(
        "activation", GATED["t5"],
        lambda stored, rows, width: gated_bytes(4)(stored, rows, width) + codes(stored, HIDDEN, 1),
        AFTER, {"operations": ("activation", "dropout")}, frozen=True,
    ),
    **{
        f"norm {name}": Member("norm", make, norm_bytes(3), ("module.bias", "module.norm.bias"))
        for name, make in NORMS.items()
    },
    **{
        f"norm layer {bits} bits": Member("norm", nn.LayerNorm, norm_bytes(bits), ("module.bias",), {"norm_bits": bits})
        for bits in (8, 4, 2)
    },
    **{
        f"norm {name}": Member(
            "norm", make, lambda *_, of=of: aligned(8, 4 * of[0], codes(*of[1:], 3), scales(*of[1:])),
            ("module.norm.bias",),
        )
        for name, (make, *of) in CHANNEL_NORMS.items()
    },
    **{
        f"pooling {name}": Member(
            "pooling", make, lambda stored, rows, width, of=of: of[0] * math.ceil(rows * of[1] / 8), ("x",)
        )
        for name, (make, *of) in POOLS.items()
    },
    **{
        f"dropout{title}": Member("dropout", lambda width, inplace=inplace: nn.Dropout(0.3, inplace),
                                  lambda stored, rows, width: codes(stored, width, 1), ("x",))
        for title, inplace in (("", False), (" in place", True))
    },
    "attention": _attention(),
    "attention 8 bits": _attention(8),
    "attention causal": _attention(is_causal=True),
    "attention bool mask": _attention(mask=BOOL, more=BOOL.nbytes),
    "attention additive mask": _attention(mask=ADDITIVE, more=ADDITIVE.nbytes),
    "attention grouped": _attention(heads=(4, 2), enable_gqa=True),
    "attention scale": _attention(scale=0.4),
    "attention dropout": _attention(dropout=True, dropout_p=0.3),
    "attention dropout causal": _attention(dropout=True, dropout_p=0.3, is_causal=True),
    "attention padding": Member(
        "attention", Attention, attention_bytes(4, hidden=True), masked=True, bias=1e-3
    ),
    "attention softmax": Member(
        "attention", lambda width: nn.Softmax(-1),
        lambda stored, rows, width: aligned(8, codes(rows, width, 4), scales(rows, width)),
    ),
    "attention nn.MultiheadAttention": _attending(multihead, ("out_proj.weight", "out_proj.bias")),
    "attention roberta": _attending(roberta, dropout=True),
    "attention llama": _attending(llama, ("o_proj.weight",), heads=(4, 2), more=2 * TOKENS * WIDTH),  # cos and sin
    "experts": Member("experts", mixtral, experts_bytes, frozen=True),
    "experts with biases": Member(
        "experts", gpt_oss, experts_bytes, ("module.experts.down_proj_bias",), frozen=True
    ),
    # Its scores have no scale, and a deviation of about 2.
    **{
        f"attention t5{title}": _attending(
            lambda width, p=p: t5(width, p), ("o.weight",), 0.012, more=4 * 4 * TOKENS**2, dropout=bool(p)
        )
        for title, p in (("", 0.0), (" dropout", 0.3))
    },
    "attention own code roberta": _region(roberta, random=1),
    "attention own code llama": _region(llama, ("o_proj.weight",), heads=(4, 2), more=2 * TOKENS * WIDTH),
    "attention own code t5": _region(functools.partial(t5, dropout=0.3), ("o.weight",), 8, random=1),
    "convolution": _convolution(2, functools.partial(nn.Conv2d, kernel_size=3, stride=(1, 2), padding=1, groups=2)),
    "convolution transposed": _convolution(
        1, functools.partial(nn.ConvTranspose1d, kernel_size=3, stride=2, output_padding=1)
    ),
    "convolution circular": _convolution(
        3, functools.partial(nn.Conv3d, kernel_size=3, padding=1, padding_mode="circular", bias=False), 4
    ),
    "convolution weight normed": _convolution(
        1, lambda *sizes: parametrizations.weight_norm(nn.Conv1d(*sizes, kernel_size=3)), more=4 * 6
    ),
    "convolution own code": _convolution(2, functools.partial(own.TurnedConvolution, kernel_size=3, padding=1)),
    "dropout own code": Member("dropout", lambda width: own.OwnDropout(), pointwise_bytes(1, False), ("x",)),
    "activation own code clamp": Member(
        "activation",
        lambda width: own.OwnClamp(),
        lambda stored, rows, width: 2 * pointwise_bytes(1, False)(stored, rows, width),
        ("x",),
    ),
    "activation own code scale": Member("activation", own.OwnScale, scale_bytes),
    "activation own code": Member(
        "activation", lambda width: Own(),
        lambda stored, rows, width: aligned(8, codes(rows, width, 4), scales(rows, width)),
    ),
    "activation own code with a parameter": Member(
        "activation", lambda width: OwnParameter(),
        lambda stored, rows, width: 2 * aligned(8, codes(rows, width, 4), scales(rows, width)),
    ),
    "activation own code of a gate": Member(
        "activation", OwnGate,
        lambda stored, rows, width: aligned(8, codes(rows, 2 * HIDDEN, 4), scales(rows, 2 * HIDDEN)), AFTER,
        frozen=True,
    ),
}  # fmt: skip

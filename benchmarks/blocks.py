"""The models of the suite in plain torch, for machines without transformers: the same layers, sizes and names of calls.

RoBERTa's encoder (residual, then LayerNorm; GELU; a classifier on the first token) and LLaMA's decoder layer (RMSNorm,
rotary positions, SwiGLU, causal attention).
"""

from __future__ import annotations

import abc
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class _Layer(nn.Module, abc.ABC):
    """A layer that can be recomputed in the backward pass."""

    gradient_checkpointing = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            result = checkpoint(self.body, hidden, use_reentrant=False)
            assert isinstance(result, Tensor)  # noqa: S101, what checkpoint returns has no type
            return result
        return self.body(hidden)

    @abc.abstractmethod
    def body(self, hidden: Tensor) -> Tensor:
        """The layer itself."""


def _attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, *, causal: bool, turn: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    if turn is not None:
        query, key = _rotate(query, *turn), _rotate(key, *turn)
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)


def _rotate(part: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = part.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class EncoderLayer(_Layer):
    """RoBERTa's layer."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        """Make the layer.

        Args:
            hidden: Width.
            heads: Attention heads.
            inner: Width of the feed-forward part.
        """
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.attention_output, self.attention_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.intermediate, self.output, self.norm = (
            nn.Linear(hidden, inner),
            nn.Linear(inner, hidden),
            nn.LayerNorm(hidden),
        )

    def body(self, hidden: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            hidden: Shape (batch, length, hidden).

        Returns:
            The same shape.
        """
        mixed = _attention(self.query(hidden), self.key(hidden), self.value(hidden), self.heads, causal=False)
        hidden = self.attention_norm(hidden + self.attention_output(mixed))
        return self.norm(hidden + self.output(F.gelu(self.intermediate(hidden))))


class Encoder(nn.Module):
    """RoBERTa for the classification of sequences."""

    def __init__(self, *, vocabulary: int, positions: int, hidden: int, layers: int, heads: int, inner: int) -> None:
        """Make the model.

        Args:
            vocabulary: Tokens known.
            positions: Longest sequence.
            hidden: Width.
            layers: Number of layers.
            heads: Attention heads.
            inner: Width of the feed-forward part.
        """
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads, inner) for _ in range(layers))
        self.dense, self.out_proj = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        """Classify.

        Args:
            input_ids: Shape (batch, length).
            labels: Shape (batch,).

        Returns:
            loss and logits.
        """
        hidden = self.norm(self.words(input_ids) + self.positions.weight[: input_ids.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.out_proj(torch.tanh(self.dense(hidden[:, 0])))
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


class DecoderLayer(_Layer):
    """LLaMA's layer."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        """Make the layer.

        Args:
            hidden: Width.
            heads: Attention heads.
            inner: Width of the feed-forward part.
        """
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mixed = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.attention_norm, self.norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def body(self, hidden: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            hidden: Shape (batch, length, hidden).

        Returns:
            The same shape.
        """
        half = hidden.shape[-1] // self.heads // 2
        rates = 10000.0 ** (-torch.arange(half, device=hidden.device) / half)
        angles = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(1) * rates
        turn = (angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype))
        x = self.attention_norm(hidden)
        mixed = _attention(self.query(x), self.key(x), self.value(x), self.heads, causal=True, turn=turn)
        hidden = hidden + self.mixed(mixed)
        x = self.norm(hidden)
        return hidden + self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    """LLaMA's layers, without vocabulary."""

    def __init__(self, *, hidden: int, layers: int, heads: int, inner: int) -> None:
        """Make the model.

        Args:
            hidden: Width.
            layers: Number of layers.
            heads: Attention heads.
            inner: Width of the feed-forward part.
        """
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)

    def forward(self, inputs_embeds: Tensor) -> SimpleNamespace:
        """Apply all layers.

        Args:
            inputs_embeds: Shape (batch, length, hidden).

        Returns:
            last_hidden_state, of the same shape.
        """
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(last_hidden_state=self.norm(hidden))

"""Blocks with attention whose choices are of several words, as tests of compositions and of their faults have them."""

import torch
from torch import nn

from rmm_linear.planning import BlockPlan, PlannedBlock

WIDTH, HEADS, TOKENS = 64, 4, 320


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(found.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(x))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model_of(layers=3, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return Model(layers)


def example(device="cpu", count=2):
    return torch.ones(count, TOKENS, WIDTH, device=device).cumsum(1) / TOKENS


def gradients(model):
    torch.manual_seed(1)
    model.zero_grad()
    model(example()).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def plan(model, choice, folder, **fields):
    return BlockPlan([PlannedBlock(f"layers.{n}", choice, **fields) for n in range(len(model.layers))], folder=folder)

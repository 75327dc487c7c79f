"""Tests of static memory: a model, real steps of its optimizer, and the bytes of what they made."""

import functools

import torch
from torch import nn
from torch.optim import SGD, AdamW

FOREACH = functools.partial(AdamW, foreach=True)
LOOP = functools.partial(AdamW, foreach=False)
MOMENTUM = functools.partial(SGD, momentum=0.9)


def network(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.Linear(64, 96))


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def state_bytes(optimizer):
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}  # some are shared
    return bytes_of(tensors.values())


def train(model, optimizer, steps=1):
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()

"""Small networks for planners: dropout, BatchNorm, in-place ReLU, skips, tied weights."""

import gc

import torch
from torch import nn
from transformers import LlamaConfig, RobertaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.roberta.modeling_roberta import RobertaForSequenceClassification

from rmm_linear.memory import peak
from rmm_linear.planning.step.step import run_step


class Block(nn.Module):
    """A residual MLP block with dropout."""

    def __init__(self, width, p=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(p), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def mlp(width=32, blocks=6, p=0.1):
    return nn.Sequential(nn.Linear(8, width), *(Block(width, p) for _ in range(blocks)), nn.Linear(width, 3))


def roberta(layers=4):
    config = RobertaConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=256
    )
    return RobertaForSequenceClassification(config)


def llama(layers=2, **sizes):
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=128,
        tie_word_embeddings=True,
        use_cache=False,
        **sizes,
    )
    return LlamaForCausalLM(config)


class Residual(nn.Module):
    """Two convolutions with BatchNorm and in-place ReLU."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        inner = self.relu(self.norm1(self.first(x)))
        return self.relu(x + self.norm2(self.second(inner)))


class CNN(nn.Module):
    """Residual blocks, and two outputs, one of which is never used."""

    def __init__(self, channels=16, blocks=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.body = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = block(x)
        pooled = x.mean((2, 3))
        return self.head(pooled), pooled.detach()


def double(inputs, outputs):
    def half(i, o):
        return nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)

    return nn.Sequential(*half(inputs, outputs), *half(outputs, outputs))


class UNet(nn.Module):
    """Down, up, and skips between."""

    def __init__(self, channels=8, depth=3):
        super().__init__()
        widths = [channels << level for level in range(depth + 1)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, 2, 1)

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([skips.pop(), rise(x)], 1))
        return self.head(x)


def batch_of(name):
    generator = torch.Generator().manual_seed(1)
    if name in ("roberta", "llama"):
        ids = torch.randint(5, 300, (4, 24), generator=generator)
        labels = ids if name == "llama" else torch.tensor([0, 1, 1, 0])
        mask = (torch.arange(24) < torch.tensor([[24], [20], [17], [24]])).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name == "mlp":
        return torch.randn(64, 8, generator=generator)
    return torch.randn(2, 3, 32, 32, generator=generator)


NETWORKS = {"mlp": mlp, "roberta": roberta, "llama": llama, "cnn": CNN, "unet": UNet}


def network(name, **sizes):
    """A network with fixed weights, in training mode, and a batch."""
    torch.manual_seed(0)
    return NETWORKS[name](**sizes).train(), batch_of(name)


def gradients(model, run, *, restore=False):
    """Gradients and buffers of a step from fixed random numbers, by name; the buffers may be put back."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()} if restore else {}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    run()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    for name, value in before.items():
        model.get_buffer(name).copy_(value)
    return found


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def real_peak(model, example):
    """Bytes that a real step makes, from no gradients on; those are dropped again."""
    model.zero_grad(set_to_none=True)
    gc.collect()
    with peak("cpu") as measured:
        run_step(model, example)
    model.zero_grad(set_to_none=True)
    return measured.bytes

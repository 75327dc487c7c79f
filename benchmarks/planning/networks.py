"""The networks of the benchmark of plans: torchvision's, a U-Net, and transformers."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suites.models import build


class UNet(nn.Module):
    """Halves the image four times and doubles it again, with a skip on every level."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.first = _two_convolutions(3, width)
        self.down = nn.ModuleList(_two_convolutions(half, 2 * half) for half in widths[:-1])
        self.pool = nn.MaxPool2d(2)
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * half, half, 2, stride=2) for half in widths[-2::-1])
        self.up = nn.ModuleList(_two_convolutions(2 * half, half) for half in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(self.pool(skips[-1])))
        x = skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((skips.pop(), rise(x)), 1))
        return self.head(x)


def _two_convolutions(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def torchvision_models() -> Any:
    """Import torchvision's models, also where its own operators are not there for this PyTorch."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError:  # shapes of operators that are not there; networks for classification use none of them
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
        return importlib.import_module("torchvision.models")
    except ImportError as error:
        raise ImportError(
            "This needs torchvision. Run pip install torchvision, or pip install --no-deps torchvision, which leaves "
            "PyTorch as it is."
        ) from error


def image_network(name: str, batch: int, side: int, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "unet":
        model: nn.Module = UNet(**options)
    else:
        quick = {"init_weights": False} if name in ("googlenet", "vgg19") else {}
        model = getattr(torchvision_models(), name)(**quick, **options)
    return model.train(), torch.randn(batch, 3, side, side)


def transformer(name: str, batch: int, length: int, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    if importlib.util.find_spec("torchvision") is not None:
        torchvision_models()  # transformers imports it, too
    torch.manual_seed(0)
    ids = torch.randint(5, sizes["vocab_size"], (batch, length))
    if name == "roberta":
        model = build("Roberta", "ForSequenceClassification", **sizes)
        labels = torch.randint(0, 2, (batch,))
    else:
        model, labels = build("Llama", "ForCausalLM", **sizes, use_cache=False), ids
    return model.train(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


Made = tuple[nn.Module, Any]
_BATCHES = {
    "resnet50": ("ResNet-50", 4), "unet": ("U-Net", 2), "vgg19": ("VGG-19", 2), "googlenet": ("GoogLeNet", 8),
    "densenet161": ("DenseNet-161", 2),
}  # fmt: skip


def images(side: int) -> dict[str, tuple[str, Callable[[], Made]]]:
    """Map the names on the command line to title and maker, for images of a side."""
    return {
        name: (f"{title}, {batch} × {side}²", functools.partial(image_network, name, batch, side))
        for name, (title, batch) in _BATCHES.items()
    }


_TEXT: dict[str, Any] = {"vocab_size": 4000, "num_hidden_layers": 12, "num_attention_heads": 4}
_SMALL: dict[str, Callable[[], Made]] = {
    "RoBERTa 12 × 256, 8 × 128": lambda: transformer(
        "roberta", 8, 128, hidden_size=256, intermediate_size=1024, **_TEXT
    ),
    "LLaMA 12 × 256, 8 × 128": lambda: transformer("llama", 8, 128, hidden_size=256, intermediate_size=704, **_TEXT),
    **dict(images(160).values()),
}
# Sizes of Kusumoto et al. 2019, table 1; their figures below. VGG-19 and the U-Net are their own networks too.
_PAPER: dict[str, Callable[[], Made]] = {
    "ResNet-50, 96": lambda: image_network("resnet50", 96, 224),
    "ResNet-152, 48": lambda: image_network("resnet152", 48, 224),
    "VGG-19, 64": lambda: image_network("vgg19", 64, 224),
    "DenseNet-161, 32": lambda: image_network("densenet161", 32, 224),
    "GoogLeNet, 256": lambda: image_network("googlenet", 256, 224),
    "U-Net, 8 × 512²": lambda: image_network("unet", 8, 512, width=64),
}
# GB with liveness analysis: approximate dynamic program, Chen et al.'s, plain.
PUBLISHED = {
    "ResNet-50, 96": (3.4, 3.7, 8.9),
    "ResNet-152, 48": (2.3, 2.4, 9.2),
    "VGG-19, 64": (4.5, 4.7, 7.0),
    "DenseNet-161, 32": (1.6, 1.8, 8.5),
    "GoogLeNet, 256": (5.2, 6.5, 8.5),
    "U-Net, 8 × 512²": (5.0, 7.4, 9.1),
}
_TINY: dict[str, Callable[[], Made]] = {"U-Net, 1 × 32²": lambda: image_network("unet", 1, 32, width=4, levels=2)}


def small(tiny: bool) -> dict[str, Callable[[], Made]]:
    return _TINY if tiny else _SMALL


def large(tiny: bool) -> dict[str, Callable[[], Made]]:
    return {"U-Net, 8 × 512²": _TINY["U-Net, 1 × 32²"]} if tiny else _PAPER

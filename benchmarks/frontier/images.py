"""A small vision transformer, trained from scratch on the handwritten digits that scikit-learn carries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frontier.study import Study

_HELD_OUT = 360  # of 1797


def images(*, tiny: bool = False) -> Study:
    """Read the digits, 8 × 8 pixels each.

    Args:
        tiny: Whether all is small.

    Returns:
        The study.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:_HELD_OUT], order[_HELD_OUT:]
    if tiny:
        held_out, rest = held_out[:40], rest[:160]
    train, dev = ({"pixel_values": pixels[rows], "labels": labels[rows]} for rows in (rest, held_out))

    def model(seed: int) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        torch.manual_seed(seed)
        width, layers = (32, 2) if tiny else (128, 4)
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 4, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
        return ViTForImageClassification(ViTConfig(**sizes))

    methods = ("exact", "dense-10", "few-bits", "gact", "linears", "wide", "tenth", "narrow")
    return Study(
        title="ViT on digits", train=train, dev=dev, model=model, score=_error, metric="error rate", batch=64,
        steps=12 if tiny else 1500, every=6 if tiny else 100, learning_rate=1e-3, methods=methods,
    )  # fmt: skip


def _error(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(-1) != labels).double().mean())

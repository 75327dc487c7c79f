"""``rmm-linear doctor``: say on one page how a model of transformers trains, and what to type."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from rmm_linear.command import PROGRAM
from rmm_linear.command.methods import prepared
from rmm_linear.command.models import ERRORS
from rmm_linear.integrations.doctor import doctor

_OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "none": None}


def examine(arguments: argparse.Namespace) -> int:
    """Print the page. Return the exit status: 0, or 2 for bad input."""
    try:
        print(_page(arguments))
    except ERRORS as error:
        print(f"{PROGRAM} doctor: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _page(arguments: argparse.Namespace) -> Any:
    model, batch = prepared(arguments)
    optimizer = _OPTIMIZERS[arguments.optimizer]
    # Weights are random, and so would be their noise.
    return doctor(model, batch, optimizer=optimizer, noise=False, progress=arguments.progress)

"""``rmm-linear doctor``: say on one page how a model of transformers trains, and what to type."""

from __future__ import annotations

import argparse

from rmm_linear.command.methods import OPTIMIZERS, prepared
from rmm_linear.integrations.doctor import doctor


def run(arguments: argparse.Namespace) -> int:
    """Print the page. Return the exit status: 0."""
    model, batch = prepared(arguments)
    optimizer = OPTIMIZERS[arguments.optimizer]
    # Weights are random, and so would be their noise.
    print(doctor(model, batch, optimizer=optimizer, noise=False, progress=arguments.progress))
    return 0

"""``rmm-linear explain``: show what a conversion of a model of transformers saves."""

from __future__ import annotations

import argparse

from rmm_linear._support.quiet import quiet
from rmm_linear.command.models import batch_for, check_batch, random_model, running
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.explained import explained, keep_exact_on


def run(arguments: argparse.Namespace) -> int:
    """Print what a conversion saves. Return the exit status: 0."""
    check_batch(arguments)
    config = RMMConfig() if arguments.rmm_config is None else RMMConfig.load(arguments.rmm_config)
    if arguments.operations is not None:
        config = config.replace(operations=arguments.operations)
    model = random_model(arguments.model)
    batch = batch_for(model, arguments)
    with quiet():
        report = convert(model, config)
    with running(model, is_random=arguments.batch is None):
        assert report.context is not None  # noqa: S101
        with quiet():
            keep_exact_on(model, report.context, batch)
        found = explained(model, report, batch)
    print(found)
    return 0

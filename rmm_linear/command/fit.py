"""``rmm-linear fit``: plan how a model of transformers trains within a memory budget."""

from __future__ import annotations

import argparse

from rmm_linear.command.flex import counted_as_trained
from rmm_linear.command.methods import OPTIMIZERS, prepared
from rmm_linear.fitting.fit import fit
from rmm_linear.integrations.fit_settings import read_fit


def run(arguments: argparse.Namespace) -> int:
    """Fit a model, and print the report. Return the exit status: 0; a budget that cannot be met is an error."""
    given = {
        name: getattr(arguments, name) for name in ("time", "max_noise", "allow", "folder", "host_memory", "bandwidth")
    }
    if arguments.memory is not None:
        given["memory"] = arguments.memory
    elif arguments.time is None:
        raise ValueError("A budget is needed. Give --memory 8GB, or --time 1.2 for the least memory in that time.")
    settings = read_fit({name: value for name, value in given.items() if value is not None})
    model, batch = prepared(arguments)
    notes = counted_as_trained(model)
    report = fit(model, batch, optimizer=OPTIMIZERS[arguments.optimizer], progress=arguments.progress, **settings)
    report.notes[:0] = notes
    print(report)
    if arguments.save is not None:
        report.plan.save(arguments.save)
    return 0

"""``rmm-linear simulate``: the peak of a training step of a model without weights, and ways to fit it into memory."""

from __future__ import annotations

import argparse
import json

from rmm_linear._support.tables import wrapped
from rmm_linear.command.flex import counted_as_trained
from rmm_linear.command.methods import OPTIMIZERS, prepared
from rmm_linear.command.models import running
from rmm_linear.fitting.described import described, described_batch
from rmm_linear.fitting.oom import explain_oom
from rmm_linear.fitting.search import check_size
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.fitting.step_memory import step_memory
from rmm_linear.planning.budget import read_budget
from rmm_linear.planning.step.flash import as_on_gpu


def run(arguments: argparse.Namespace) -> int:
    """Print the peak, and ways out where it is above the memory. Return the exit status: 0, or 1 if it is."""
    if arguments.memory is not None:
        check_size(arguments.memory)
    model, batch = prepared(arguments, on_meta=True)
    notes, optimizer = counted_as_trained(model), OPTIMIZERS[arguments.optimizer]
    with running(model, is_random=arguments.batch is None), as_on_gpu():
        found = step_memory(model, batch, static_memory(model, optimizer))
    memory = None if arguments.memory is None else read_budget(arguments.memory, found.peak)
    explained = None
    if memory is not None and found.peak > memory:
        explained = explain_oom(model, batch, memory, optimizer=optimizer, progress=arguments.progress)
        notes += explained.notes
    if arguments.json:
        of_batch = {"size": arguments.size, "length": arguments.length} if arguments.batch is None else {}
        about = {name: getattr(arguments, name) for name in ("model", "method", "optimizer")} | of_batch
        fits = None if memory is None else explained is None
        ways = [] if explained is None else explained.to_dict()["ways"]
        about |= {"memory": memory, "fits": fits}
        print(json.dumps({**about, **found.to_dict(), "ways": ways, "notes": notes}, indent=2))
    elif explained is not None:
        print(explained)
    else:
        print(f"{found}\n\n{wrapped(described(model))}\n{wrapped(described_batch(batch, optimizer))}")
        print(*(wrapped(f"Note: {note}", 2) for note in notes), sep="\n", end="\n" if notes else "")
    return 0 if explained is None else 1

"""A step in which parts run again is that of the plain loop to the bit, or an error says why it is not."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import replay_parts as parts
import torch
from replay_cases import (
    EXECUTORS,
    Trial,
    beside_a_plain_run,
    failed_forward,
    failed_repetition,
    in_a_checkpoint,
    kind_of,
    on_a_copy,
    once,
    replace_weight,
    retained,
    then,
    twice,
    two_at_once,
    under_autocast,
    without_its_gradient,
)
from torch import nn

from rmm_linear.planning import BlockPlan, PlannedBlock

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
ERRORS = RuntimeError, ValueError


class Hazard(NamedTuple):
    """A part of the model, and what the user does with it.

    An executor may refuse a step with a message like ``refusal``, and must where the plain loop fails too.
    """

    part: type[parts.Part]
    procedure: Callable[[Trial], list[Any]] = once
    refusal: str | None = None


STEPS = {
    "two steps": twice,
    "retained graph": retained,
    "first forward first back": two_at_once,
    "last forward first back": functools.partial(two_at_once, reverse=True),
    "failed forward": failed_forward,
    "failed repetition": failed_repetition,
}
WITH = {"": parts.Dropping, ", with a buffer": parts.InPlace}
HAZARDS = {
    "dropout": Hazard(parts.Dropping),
    "buffer in place": Hazard(parts.InPlace),
    "buffer by data": Hazard(parts.ByData),
    "saved buffer by data": Hazard(parts.Saved),
    "buffer by data, later": Hazard(parts.LaterByData, refusal="through .data|Data-dependent"),
    "large buffer": Hazard(parts.Constant),
    "buffer replaced": Hazard(parts.Replacing),
    "buffer of another dtype": Hazard(parts.Retyping),
    "buffer that returns": Hazard(parts.Returning),
    "buffer with a gradient": Hazard(parts.Carrying, refusal="left the buffer .* with a graph"),
    "buffer that grows": Hazard(parts.Growing),
    "buffer made by the first run": Hazard(parts.Beginning),
    "buffers swapped": Hazard(parts.Swapping),
    "shared buffer in place": Hazard(parts.Sharing),
    "shared buffer replaced": Hazard(parts.Parting),
    "shared buffer by data": Hazard(parts.SharingData),
    "buffer written in eval mode": Hazard(parts.Evaluating),
    "batch norm": Hazard(parts.Norming),
    "shared batch norm": Hazard(parts.Renorming),
    "spectral norm": Hazard(parts.Spectral),
    "random branches": Hazard(parts.Branching),
    "buffer between two uses": Hazard(parts.Between),
    "part of a buffer between two uses": Hazard(parts.Queueing),
    "functions in place": Hazard(parts.Positional),
    "a tensor that many read": Hazard(parts.Read),
    "autocast inside": Hazard(parts.Switching),
    "autocast": Hazard(parts.Dropping, under_autocast),
    "autocast without its cache": Hazard(parts.Dropping, functools.partial(under_autocast, cached=False)),
    "autocast, and a plain run in it": Hazard(parts.Dropping, beside_a_plain_run),
    "tied weights": Hazard(parts.Tied),
    "hooks of parameters": Hazard(parts.Hooked),
    "hooks of results": Hazard(parts.Tapped),
    "frozen parts": Hazard(parts.Frozen),
    "all parameters frozen": Hazard(parts.Still),
    "input without a gradient": Hazard(parts.Dropping, without_its_gradient),
    "cached spectral norm": Hazard(
        parts.Spectral, then(lambda trial: None, around=nn.utils.parametrize.cached), "cached"
    ),
    "LSTM": Hazard(parts.Recurrent),
    "lazy module": Hazard(parts.Lazy, refusal="uninitialized parameter|lazy module"),
    "weights lent": Hazard(parts.Lent),
    "column by column": Hazard(parts.Across),
    "result in place": Hazard(parts.Finishing),
    "argument in place": Hazard(parts.Overwriting, on_a_copy, "in.?place"),
    "parameter written by the step": Hazard(parts.Decaying, refusal="in.?place"),
    "backward pass inside": Hazard(parts.Descending, refusal="backward an extra time|autograd.grad"),
    "checkpoint inside": Hazard(parts.Checkpointing),
    "in a checkpoint": Hazard(parts.Deep, in_a_checkpoint),
    "in a reentrant checkpoint": Hazard(parts.Deep, functools.partial(in_a_checkpoint, reentrant=True)),
    "copies of saved tensors": Hazard(
        parts.InPlace,
        then(lambda trial: None, around=lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)),
    ),
    **{f"{name}{what}": Hazard(part, do) for name, do in STEPS.items() for what, part in WITH.items()},
    "input changed later": Hazard(parts.Dropping, then(lambda trial: trial.x.mul_(2)), "in.?place"),
    "weight changed later": Hazard(
        parts.Dropping, then(lambda trial: trial.blocks[0].first.linear.weight.mul_(2)), "in.?place"
    ),
    "bias changed later": Hazard(  # no backward pass needs it, so the plain loop does not mind
        parts.Dropping, then(lambda trial: trial.blocks[0].first.linear.bias.add_(1)), "in.?place"
    ),
    "frozen weight changed later": Hazard(
        parts.Frozen, then(lambda trial: trial.blocks[0].second.linear.weight.mul_(2)), "in.?place"
    ),
    "weight changed later, tensors saved elsewhere": Hazard(  # copies, so the plain loop does not mind
        parts.Dropping,
        then(lambda trial: trial.blocks[0].first.linear.weight.mul_(2), around=torch.autograd.graph.save_on_cpu),
        "in.?place",
    ),
    "weight replaced later": Hazard(parts.Dropping, then(replace_weight), "parameter"),
    "buffer changed later": Hazard(parts.Reading, then(lambda trial: trial.blocks[0].first.k.mul_(2))),
    "mode changed later": Hazard(parts.Dropping, then(lambda trial: trial.blocks.eval())),
}

# What another order of operations could change.
OF_ORDER = {"random branches", "buffer between two uses", "buffer by data", "shared batch norm", "autocast inside"}
OF_CUTS = {"random branches", "dropout", "batch norm"}

# What an executor must refuse; by its name, or by the first words of several names, as in all tables below.
REFUSED = {
    ("plan_graph", "buffer changed later"): "modified by an inplace operation",  # a piece saves it
    ("sweep", "retained graph, with a buffer"): "must go backwards once",
    ("plan_blocks selective", "retained graph, with a buffer"): "saved results are freed",
    ("plan_graph", "checkpoint inside"): "the model has its own",
    ("plan_graph", "LSTM"): "cannot be captured",
    ("plan_blocks selective", "functions in place"): "modified by an inplace operation",  # of results that it saves
    ("plan_blocks selective", "retained graph"): "saved results are freed",
    ("bptt of a function", "hooks of parameters"): "must have no hooks.*Give an nn.Module",
    ("sweep", "retained graph"): "must go backwards once",
}
ABSENT = {
    ("plan_graph", "lazy module"): "the plan's own run gives it its shapes",
    ("bptt slots=100", "failed repetition"): "nothing runs again",
    ("bptt slots=100", "failed repetition, with a buffer"): "nothing runs again",
    ("plan_blocks offload", "failed repetition"): "nothing runs again",
    ("plan_blocks offload", "failed repetition, with a buffer"): "nothing runs again",
}
# Largest difference by the largest entry. Documented for autocast: with its cache the plain loop adds the gradients of
# a weight in half precision, which rounds each of 6 sums by 2⁻⁹. An LSTM has another kernel without gradients, which
# rounds each of 6 × 21 steps by some 2⁻²³.
NEAR = {
    ("bptt", "autocast"): 6 * 2**-8,
    ("sweep", "autocast"): 6 * 2**-8,
    ("bptt", "autocast, and a plain run in it"): 7 * 2**-8,
    ("sweep", "autocast, and a plain run in it"): 7 * 2**-8,
    ("bptt", "LSTM"): 6 * 21 * 2**-23,
    ("sweep", "LSTM"): 6 * 21 * 2**-23,
}
# A schedule by measured times may be another one when it runs again, which PyTorch's checkpoint refuses.
AT_TIMES = {("sweep folder auto", "in a checkpoint"): "different metadata|different number of tensors|were saved"}


def found_in(table, executor, hazard):
    begins = [executor.rsplit(" ", count)[0] for count in range(executor.count(" ") + 1)]
    return next((table[begin, hazard] for begin in begins if (begin, hazard) in table), None)


def cells():
    """Every executor with every hazard; where executors differ in where states lie alone, by default a third."""
    for number, executor in enumerate(EXECUTORS):
        for place, hazard in enumerate(HAZARDS):
            absent = found_in(ABSENT, executor, hazard)
            marks = [pytest.mark.skip(reason=absent)] if absent else []
            # Whichever method cuts a graph, its pieces run alike: all that may happen is tried with one.
            is_like_another = executor in ("plan_graph chen", "plan_graph kusumoto")
            is_left = is_like_another and hazard not in OF_CUTS
            is_left |= executor == "plan_graph cuts ordered" and hazard not in OF_ORDER
            is_special = any(found_in(table, executor, hazard) for table in (REFUSED, NEAR, AT_TIMES))
            has_many = executor.startswith(("bptt ", "sweep ", "plan_blocks "))
            is_left |= has_many and not is_special and hazard not in OF_CUTS and (number + place) % 3 != 0
            marks += [pytest.mark.thorough] if is_left else []
            yield pytest.param(executor, hazard, marks=marks, id=f"{executor}-{hazard}")


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()


def outcome(name, *of):
    """What a user sees, or the error."""
    try:
        trial = Trial.of(HAZARDS[name].part, *of)
        return [*HAZARDS[name].procedure(trial), *trial.seen()]
    except ERRORS as error:
        return error


plain_outcome = functools.cache(outcome)


def same(found, expected, near):
    if found is None or expected is None:
        return found is expected
    if near is None or not expected.is_floating_point():
        return torch.equal(found, expected)
    return (found - expected).abs().max() <= near * expected.abs().max()


@pytest.mark.parametrize(("executor", "name"), cells())
def test_a_step_is_that_of_the_plain_loop(executor, name, tmp_path):
    refused, near, kind = found_in(REFUSED, executor, name), found_in(NEAR, executor, name), kind_of(executor)
    expected, found = plain_outcome(name, kind), outcome(name, kind, executor, tmp_path)
    if isinstance(found, Exception):
        allowed = refused or HAZARDS[name].refusal or AT_TIMES.get((executor, name), "$ no error is right")
        if re.search(allowed, str(found)) is None:
            raise found
    else:
        assert not refused
        assert not isinstance(expected, Exception)
        assert len(found) == len(expected)
        wrong = [place for place, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair, near)]
        assert not wrong


@pytest.mark.parametrize("choice", ["recompute", "selective", "nested", "offload", "selective + offload"])
def test_a_keyword_argument_that_changes_later_is_as_it_was_or_refused(choice, tmp_path):
    def gradient(executor):
        torch.manual_seed(0)
        model, x = parts.Passing(), torch.randn(parts.ROWS, parts.WIDTH, requires_grad=True)
        if executor:
            inner = [(f"blocks.{n}.first", f"blocks.{n}.second") if executor == "nested" else () for n in range(3)]
            rows = [PlannedBlock(f"blocks.{n}", executor, inner=names) for n, names in enumerate(inner)]
            BlockPlan(rows, folder=str(tmp_path)).apply(model)
        try:
            model(x).square().sum().backward()
        except RuntimeError as error:
            return str(error)
        return x.grad

    expected, found = gradient(None), gradient(choice)
    assert "in place" in found if isinstance(found, str) else torch.equal(found, expected)

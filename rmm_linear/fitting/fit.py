"""Make a model train within a memory budget, with one call."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from rmm_linear._support.distributed import is_dtensor, tensor_parallel
from rmm_linear._support.progress import reporting
from rmm_linear._support.quiet import quiet
from rmm_linear._support.validation import did_you_mean
from rmm_linear.context.checkpointing import REPLACE, check_checkpointing, uncheckpointed
from rmm_linear.conversion.exact import converted_modules
from rmm_linear.fitting.duration import expect_fit
from rmm_linear.fitting.fitting import Fitting
from rmm_linear.fitting.options import ALLOW
from rmm_linear.fitting.ranks import Member, ranks_of
from rmm_linear.fitting.report import FitReport
from rmm_linear.fitting.resident import resident
from rmm_linear.memory.inputs import check_example
from rmm_linear.planning.blocks.plan import KEEP
from rmm_linear.planning.budget import LEAST, check_model, read_budget
from rmm_linear.planning.step.divided import divided, part_of
from rmm_linear.planning.step.sharded import is_sharded
from rmm_linear.planning.step.shards import Shards, check_shards

logger = logging.getLogger(__name__)

_OBJECTIVES = ("time", "noise")
REPLACED = (
    "Activation checkpointing was on, and is off as long as the plan is applied, which chooses what is recomputed. "
    'revert() turns it on again; checkpointing="keep" leaves it on.'
)


def fit(
    model: nn.Module,
    example: Any,
    memory: int | float | str | None = None,
    *,
    optimizer: Any = None,
    max_noise: float = 1.0,
    allow: Collection[str] = ALLOW,
    time: float | None = None,
    objective: str = "time",
    folder: str | None = None,
    host_memory: int | str | None = None,
    bandwidth: float | str | None = None,
    shards: Shards | None = None,
    accumulate: bool = False,
    checkpointing: str = REPLACE,
    progress: bool | None = None,
) -> FitReport:
    """Make a model train within a memory budget: measure a step, choose for every block, apply it, check it, report.

    Every block (a layer of a transformer; embeddings and heads are blocks too) saves its activations, compresses them
    to one of a few widths, or is recomputed, wholly or without its products or attention. What it saves then may wait
    on the host, and its position-wise modules may run in slices of the sequence; a language model's loss may be
    computed in chunks. The exact model is tried first, and what is several of these last. The bytes of each option are
    measured on the example, its time on a block of each kind, its variance on the example's own gradient. A solver
    proposes, simulated steps judge, and the model is changed once a plan fits. ``rmm_linear.revert(model)`` undoes it.

    A model in ``DistributedDataParallel``, or divided by ``fully_shard``, is fitted by all of its processes together:
    each calls this with its own batch. The one whose step takes the most memory plans, all apply its plan and check it
    by a real step, and an error of one reaches all. Sharded models are planned without times and noise.

    Source: one option per block with a row per block's peak, as in Chen et al. 2016 (arXiv 1604.06174) and
    later work; compressed activations as in Bershatsky et al. 2022 (arXiv 2201.13195).

    Args:
        model: The model, neither converted nor planned. On the meta device it is planned without values. One that is
            wrapped or divided needs the call in every process.
        example: A training batch, as for :func:`rmm_linear.planning.simulate`. Larger batches need more memory.
        memory: Budget for parameters, buffers, gradients, the optimizer and what a step makes: bytes, a text such as
            "8GB", or a share of the exact model's peak in (0, 1]; "least" for the least memory that is found. It may be
            left out with ``time``.
        optimizer: An optimizer, its class, or a function of parameters that makes one, whose state is counted; None
            counts none.
        max_noise: The largest variance ratio, D² / D²_SGD, that compression may cause in the gradient of a layer's
            weights; 1 is as much as the minibatch has. Options above it are left out.
        allow: Of "keep", "sketch" (linear layers), "pack" (other operations), "recompute",
            "offload" and "tile" (slices of the sequence; chunks of the loss). Without "sketch" and "pack", gradients
            are exact.
        time: A bound for the time of a step, relative to the exact step; then memory is minimized.
        objective: "time": the least sum of a step's time and of the variance ratio, of which 0.1 counts as 10 % of the
            exact step: so much larger is a batch that makes up for it. "noise": least variance, then least time.
        folder: Where offloaded blocks of a model on the CPU write files; without it they are not offloaded.
        host_memory: Limit of what waits on the host, or in files, and of what ``shards`` puts there: bytes, or a text
            such as "64GB". None is no limit for files and models on the meta device, else three quarters of this
            machine's memory.
        bandwidth: Of the link to the host in each direction: bytes per second, or a text such as "25GB/s". None: it is
            measured on an accelerator, files are timed, and it is 25 GB/s for a model on the meta device.
        shards: How the step will be divided among devices, of which bytes are then those of one; not with ``stages``.
            Whatever divides more than parameters is planned for a model on the meta device.
        accumulate: Whether the gradients of earlier batches are there when a step begins, as with gradient
            accumulation, or where ``zero_grad(set_to_none=False)`` leaves them.
        checkpointing: "replace" turns the model's activation checkpointing off, as the plan chooses what is recomputed;
            ``revert`` turns it on again. "keep" plans for the model with it.
        progress: Whether to say on stderr how far it is, a line per stage, and how long it will take. None: on a
            terminal, or where the library's logger is at INFO; in the first process only.

    Returns:
        The report. Print it.

    Raises:
        ValueError: If nothing fits: with the least, the block that binds, and what would help; if an argument is out
            of range; or if the model is converted or planned already, or divided otherwise than by ``fully_shard``.
            The model is then as it was, in all processes.
        RuntimeError: What another process raised, with its rank, if that was neither a ValueError nor a TypeError.
        TypeError: If neither ``memory`` nor ``time`` is given.

    Example:
        >>> import torch
        >>> layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        >>> model = nn.Sequential(*layers)
        >>> report = fit(model, torch.randn(1000, 64), memory=0.7)
        >>> report.fits, report.peak <= 0.7 * report.exact_peak
        (True, True)
    """

    def check() -> str:
        check_arguments(
            model, memory, allow, time, objective, max_noise, checkpointing, example, shards,
            may_be_sharded=shards is None,
        )  # fmt: skip
        return f"memory={memory!r}, time={time!r}, allow={sorted((allow,) if isinstance(allow, str) else allow)}"

    def planned(on_ranks: Any = None) -> FitReport:
        has_other_sizes = shards is not None and shards.tensor > 1
        with divided(model, shards):
            work = Fitting(
                model, part_of(example, shards), None if memory == LEAST else memory,
                optimizer=optimizer, allow=allow, objective=objective, folder=folder, host_memory=host_memory,
                bandwidth=bandwidth, shards=shards, accumulate=accumulate, checkpointing=checkpointing,
                on_ranks=on_ranks,
            )  # fmt: skip
            report = _chosen(work, memory, allow, time, max_noise)
            if has_other_sizes:
                report.plan.revert()
        if has_other_sizes:
            report.plan.apply(model)
        return report

    ranks = ranks_of(model)
    if ranks is None:
        check()
    else:
        asked = ranks.together(check)
        if other := next((one for one in asked if one != asked[0]), None):
            raise ValueError(
                f"All processes must ask for the same, got {asked[0]} on rank 0 and {other} on rank "
                f"{asked.index(other)}. Give all of them what the least device has."
            )
    with uncheckpointed(model, checkpointing) as off:
        member = None if ranks is None else Member(ranks, resident(model, optimizer, accumulate=accumulate), example)
        with reporting("fit", progress, 0 if member is None else member.planner), quiet():
            report = planned() if member is None else member.fit(planned)
        if off.is_attached:
            report.notes.append(REPLACED)
            report.plan.undo_later(off.released())
    if ranks is None or ranks.rank == 0:
        logger.info(report.summary())
    return report


def check_whole(model: nn.Module, name: str) -> None:
    """Raise if a model is divided among ranks; ``name`` is that of the function that takes none."""
    if is_sharded(model) or any(is_dtensor(one) or hasattr(one, "ds_id") for one in model.parameters()):
        raise ValueError(
            f"{name} takes a model that is not sharded yet, got one with fully_shard, tensor parallelism or "
            "DeepSpeed's ZeRO-3. Fit it before, with shards=rmm_linear.Shards(ranks) to count what one rank holds; the "
            "plan stays when it is sharded."
        )


def _chosen(work: Fitting, memory: Any, allow: Collection[str], time: float | None, max_noise: float) -> FitReport:
    """Keep the exact model if it fits, or measure the options and solve."""
    is_first = work.total is not None and time is None and KEEP in allow
    if is_first and work.is_within(work.exact_peak) and (report := work.kept()) is not None:
        return report
    work.check_floor()
    expect_fit(work.candidates)
    work.add_options(max_noise)
    if time is not None:
        return work.within_time(time)
    return work.least() if work.total is None else work.solved()


def check_arguments(
    model: Any,
    memory: Any,
    allow: Collection[str],
    time: float | None = None,
    objective: str = "time",
    max_noise: float = 1.0,
    checkpointing: str = REPLACE,
    example: Any = None,
    shards: Shards | None = None,
    *,
    may_be_sharded: bool = False,
) -> None:
    """Check the arguments of :func:`fit`; raises its errors."""
    check_model(model)
    check_shards(shards)
    if shards is not None and shards.stages > 1:
        raise ValueError(
            f"A plan is for one module that runs as a whole, got stages={shards.stages}. Plan the module of each stage "
            "by itself; planning.simulate(model, batch, shards=...) has the peak of a stage of a whole model."
        )
    if example is not None:
        check_example(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model, example)
    check_checkpointing(checkpointing)
    if memory is None and time is None:
        raise TypeError('fit needs memory="8GB", or time=1.2 for the least memory in that time, and got neither.')
    if converted_modules(model) or any("rmm_plan" in vars(module) for module in model.modules()):
        raise ValueError(
            "fit takes a model that is as it was made, got one that is converted or has a plan. Call "
            "rmm_linear.revert(model) first."
        )
    if not (may_be_sharded and is_sharded(model) and tensor_parallel(model) is None):
        check_whole(model, "fit")
    names = (allow,) if isinstance(allow, str) else allow
    if not isinstance(names, Collection) or not names:
        raise ValueError(f"allow must be some of {', '.join(ALLOW)}, got {allow!r}. Leave it out to allow all.")
    for name in names:
        if name not in ALLOW:
            raise ValueError(f"allow must be of {', '.join(ALLOW)}, got {name!r}.{did_you_mean(name, ALLOW)}")
    if time is not None and objective != "time":
        raise ValueError(f"objective must be left out with time, which asks for the least memory, got {objective!r}.")
    if objective not in _OBJECTIVES:
        near = did_you_mean(objective, _OBJECTIVES)
        raise ValueError(f"objective must be one of {', '.join(_OBJECTIVES)}, got {objective!r}.{near}")
    for name, number in (("time", time), ("max_noise", max_noise)):
        if isinstance(number, bool) or not isinstance(number, int | float | None):
            raise TypeError(f"{name} must be a number, got {number!r}.")
    if memory is not None:
        read_budget(memory, 1)
    if time is not None and not time > 0:
        raise ValueError(f"time must be positive, relative to the exact step, got {time!r}. 1.2 allows a fifth more.")
    if max_noise is None or not max_noise > 0:
        raise ValueError(f"max_noise must be positive, got {max_noise!r}. 1 is as much variance as the minibatch has.")

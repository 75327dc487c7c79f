"""How a training step is divided among the devices of a cluster: parameters, the sequence, layers, and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rmm_linear._support.validation import check_integer, did_you_mean

GATHER, SEND = "allgather", "alltoall"  # as torch's set_rotate_method names them
ONE_BY_ONE, ALL_FIRST = "1F1B", "GPipe"
STYLES = ("colwise", "rowwise")


@dataclass(frozen=True)
class Shards:
    """How a training step is divided among devices; bytes are then those of one of them.

    Parameters are divided by ``fully_shard`` on every block and on the root; :mod:`rmm_linear.fitting.shards` has its
    rules. Ranks that share a sequence may share the parameters too: 8 devices with ``Shards(8, context=8)`` do both.
    Tensor parallelism and pipeline stages take other devices: there are ranks · tensor · stages.

    Attributes:
        ranks: Number of ranks that share the parameters; None: each has all of them.
        cpu_offload: Parameters, gradients and the optimizer's state lie in the memory of the host, as with
            ``CPUOffloadPolicy``; only what is gathered is on the device.
        context: Number of ranks that divide every sequence, as ``context_parallel`` of PyTorch does with its ring
            attention, see :mod:`rmm_linear.planning.step.ring`. Examples have whole sequences.
        rotate: How keys and values come from the other ranks: "allgather", all at once, which is PyTorch's default, or
            "alltoall", from one to the next.
        tensor: Number of ranks that divide linear layers, as ``parallelize_module`` does, see
            :mod:`rmm_linear.planning.divided`.
        tensor_plan: Which, as for ``parallelize_module``: names of modules, with ``*`` for a number, to "colwise" or
            "rowwise". None is the plan that comes with a model of transformers, ``base_model_tp_plan``.
        stages: Number of pipeline stages, to which blocks go in equal parts; :func:`rmm_linear.planning.simulate` and
            ``static_memory`` know them, see :mod:`rmm_linear.planning.blocks.stages`. Examples are micro-batches.
        stage: The stage whose bytes are counted, from 0.
        microbatches: Of one step of the pipeline; None is as many as stages.
        schedule: "1F1B", where stage i of p holds the activations of p - i micro-batches, or "GPipe", where it holds
            those of all.

    Raises:
        TypeError: If a number is no integer, or the plan no mapping.
        ValueError: If a number is less than 1, the stage is not one of the stages, or a name is none of those above.

    Example:
        >>> Shards(4).shape(torch.Size([10, 3])), Shards(stages=4, stage=1).in_flight
        (torch.Size([3, 3]), 3)
    """

    ranks: int | None = None
    cpu_offload: bool = False
    context: int = 1
    rotate: str = GATHER
    tensor: int = 1
    tensor_plan: Mapping[str, str] | None = None
    stages: int = 1
    stage: int = 0
    microbatches: int | None = None
    schedule: str = ONE_BY_ONE

    def __post_init__(self) -> None:
        for name in ("context", "tensor", "stages"):
            check_integer(name, getattr(self, name))
        for name in ("ranks", "microbatches"):
            check_integer(name, getattr(self, name), optional=True)
        check_integer("stage", self.stage, least=0)
        if self.cpu_offload and self.ranks is None:
            raise ValueError("cpu_offload is of fully_shard, got ranks=None. Use ranks=1 or more.")
        if self.ranks is not None and self.ranks % self.context:
            raise ValueError(
                f"context must divide ranks={self.ranks}, whose sequences it divides, got {self.context}. Leave ranks "
                "out where parameters stay whole."
            )
        if self.stage >= self.stages:
            raise ValueError(f"stage must be less than stages={self.stages}, got {self.stage}. The first is 0.")
        for name, known in (("rotate", (GATHER, SEND)), ("schedule", (ONE_BY_ONE, ALL_FIRST))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {value!r}.{did_you_mean(value, known)}"
                )
        if self.tensor_plan is not None and not isinstance(self.tensor_plan, Mapping):
            raise TypeError(f"tensor_plan must be a mapping of names to styles, got {self.tensor_plan!r}.")
        for pattern, style in (self.tensor_plan or {}).items():
            if style not in STYLES:
                raise ValueError(
                    f"tensor_plan must give {' or '.join(STYLES)} to a module, got {style!r} for {pattern!r}. Leave "
                    "out modules that stay whole."
                )

    def __repr__(self) -> str:
        given = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]
        return f"Shards({', '.join(f'{name}={value!r}' for name, value, default in given if value != default)})"

    def shape(self, whole: torch.Size) -> torch.Size:
        """Return the shape of one rank's part of a parameter, with the padding.

        Args:
            whole: Shape of the parameter.

        Returns:
            The shape; that of a scalar is the same.
        """
        return torch.Size([-(-whole[0] // self.ranks), *whole[1:]]) if whole and self.ranks else whole

    def gradient_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of a finished gradient that stay on the device.

        Args:
            parameter: Whose gradient it is.

        Returns:
            Bytes of the rank's part; 0 where it lies on the host.
        """
        return 0 if self.cpu_offload else self.shape(parameter.shape).numel() * parameter.itemsize

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the stage holds at once."""
        count = self.microbatches or self.stages
        return count if self.schedule == ALL_FIRST else min(count, self.stages - self.stage)


def check_shards(shards: object) -> None:
    """Raise unless a value says how a step is divided, or that it is not."""
    if not isinstance(shards, Shards | None):
        raise TypeError(f"shards must be Shards or None, got {shards!r}. Use shards=rmm_linear.Shards(8).")

"""A plan for the blocks of a model, as data: print it, save it, apply it, revert it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import nn

from rmm_linear._support.files import write_text
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import table
from rmm_linear._support.validation import did_you_mean
from rmm_linear.config import RMMConfig
from rmm_linear.conversion.convert import convert
from rmm_linear.conversion.report import ConversionReport
from rmm_linear.conversion.revert import revert
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.blocks.recompute import Recomputed
from rmm_linear.planning.offload.chain import OffloadChain, Offloaded
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import Workspace

KEEP, RECOMPUTE, SELECTIVE, NESTED = "keep", "recompute", "selective", "nested"
CONVERT, OFFLOAD = "convert", "offload"
CHOICES = (KEEP, RECOMPUTE, SELECTIVE, NESTED, CONVERT, OFFLOAD)
_MARK = "rmm_plan"  # attribute of a model with a plan, by which rmm_linear.revert finds it


@dataclass(frozen=True)
class PlannedBlock:
    """What happens to a block.

    Attributes:
        name: The block.
        choice: "keep"; "recompute"; "selective": all but the results of products is recomputed; "nested":
            recomputed, and its parts again one by one; "convert": it saves random stand-ins; "offload": what it saves
            waits in host memory, or in files.
        kept: Bytes that live after its forward pass, by the model that the plan was solved with.
        worst: Bytes at its worst moment, without what blocks before it keep.
        seconds: Time that is added to a step.
        inner: The parts of a nested block.
        setting: Name of a converted block's setting.
        noise: Variance that its stand-ins add to the gradient of its parameters, by the whole gradient's D²_SGD.
    """

    name: str
    choice: str
    kept: int = 0
    worst: int = 0
    seconds: float = 0.0
    inner: tuple[str, ...] = ()
    setting: str = ""
    noise: float = 0.0

    @property
    def option(self) -> str:
        """The choice, and the setting of a converted block."""
        return f"{self.choice} {self.setting}".rstrip()


@dataclass
class BlockPlan:
    """What happens to every block of a model: which are recomputed in the backward pass, converted, or offloaded.

    Attributes:
        blocks: In the order of the forward pass.
        memory: The budget in bytes.
        predicted: Peak of a step with the plan, simulated.
        plain: Peak of a step without it, simulated.
        moment: When the peak is.
        flops: Operations of a step, by those of a step without the plan; None if they were not counted.
        config: The conversion of the converted blocks, which leaves all others alone.
        folder: Where offloaded blocks of a model on the CPU write files.
        conversion: What :func:`rmm_linear.convert` reported when the plan was applied.
        peak: Memory over the step that was simulated when the plan was made.
    """

    FORMAT: ClassVar[str] = "rmm_linear block plan 1"

    blocks: list[PlannedBlock]
    memory: int = 0
    predicted: int = 0
    plain: int = 0
    moment: str = ""
    flops: float | None = None
    config: RMMConfig | None = None
    folder: str | None = None
    conversion: ConversionReport | None = field(default=None, repr=False, compare=False)
    _model: nn.Module | None = field(default=None, repr=False, compare=False)
    peak: Peak | None = field(default=None, repr=False, compare=False)
    is_applied: bool = field(default=False, repr=False, compare=False)
    _applied: list[Recomputed | Offloaded] = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        header = ("block", "choice", "kept", "worst moment", "seconds")
        rows = [
            (block.name, block.option, show_bytes(block.kept), show_bytes(block.worst), f"{block.seconds:.2g}")
            for block in self.blocks
        ]
        return f"{self.summary()}\n{table(header, rows)}"

    def summary(self) -> str:
        """Return the plan in one line."""
        counts = Counter(block.choice for block in self.blocks)
        chosen = " ".join(f"{choice}={counts[choice]}" for choice in CHOICES if counts[choice])
        operations = "" if self.flops is None else f"operations × {self.flops:.3f}, "
        return (
            f"rmm_linear plan: {chosen} peak {show_bytes(self.predicted)} of {show_bytes(self.plain)}, "
            f"budget {show_bytes(self.memory)}, {operations}{self.moment}"
        )

    @property
    def seconds(self) -> float:
        """Time that is added to a step."""
        return sum(block.seconds for block in self.blocks)

    def apply(self, model: nn.Module | None = None) -> nn.Module:
        """Make a model train by the plan from now on.

        Args:
            model: A model with the planned blocks; None is the one that the plan was made for.

        Returns:
            The model itself.

        Raises:
            ValueError: If the plan is applied already, has no model, the model lacks a block, has another plan or is
                converted already, or offloading from the CPU has no folder. Then the model is as it was.
        """
        model = self._model if model is None else model
        if model is None:
            raise ValueError("A plan that was loaded needs a model. Use plan.apply(model).")
        if self.is_applied:
            raise ValueError("The plan is applied already. Use plan.revert() first.")
        if _MARK in vars(model):
            raise ValueError("The model trains by another plan already. Call rmm_linear.revert(model) first.")
        modules = dict(model.named_modules())
        names = [name for block in self.blocks for name in (block.name, *block.inner)]
        for name in names:
            if name not in modules:
                raise ValueError(
                    f"The model has no module {name!r}. Plan this model itself.{did_you_mean(name, modules)}"
                )
        chosen = [name for block in self.blocks if block.choice != KEEP for name in (block.name, *block.inner)]
        for name in chosen:
            if isinstance(modules[name].__dict__.get("forward"), Recomputed | Offloaded):
                raise ValueError(f"{name} is part of another plan already. Use revert() of that plan first.")
        replaced = self._replaced(model, modules)
        self._model, self.is_applied = model, True
        try:
            if self.config is not None:
                self.conversion = convert(model, self.config)
            for each in replaced:
                each.attach()
                self._applied.append(each)
        except BaseException:
            self.revert()
            raise
        vars(model)[_MARK] = self
        return model

    def _replaced(self, model: nn.Module, modules: dict[str, nn.Module]) -> list[Recomputed | Offloaded]:
        """The forward passes that the plan replaces."""
        found: list[Recomputed | Offloaded] = []
        offloaded = [block.name for block in self.blocks if block.choice == OFFLOAD]
        chain = OffloadChain(self.folder) if offloaded else None
        for block in self.blocks:
            if block.choice == OFFLOAD and chain is not None:
                found.append(Offloaded(modules[block.name], chain))
            elif block.choice in (RECOMPUTE, SELECTIVE, NESTED):
                found += [Recomputed(modules[name]) for name in (block.inner if block.choice == NESTED else ())]
                found.append(Recomputed(modules[block.name], selective=block.choice == SELECTIVE))
        return found

    def revert(self) -> None:
        """Undo :meth:`apply`."""
        while self._applied:
            self._applied.pop().detach()
        if self._model is not None and self.is_applied:
            if vars(self._model).get(_MARK) is self:
                del vars(self._model)[_MARK]
            if self.conversion is not None:
                revert(self._model)
                self.conversion = None
        self.is_applied = False

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Apply the plan inside the block, if it is not applied already.

        Yields:
            The model.
        """
        if self.is_applied and self._model is not None:
            yield self._model
            return
        model = self.apply()
        try:
            yield model
        finally:
            self.revert()

    def simulated(self, example: Any, workspace: Workspace | None = None) -> Peak:
        """Return the peak of a step with the plan, as :func:`rmm_linear.planning.simulate` does.

        Args:
            example: A training batch.
            workspace: What operators take beyond their results.

        Returns:
            The peak.
        """
        with self.applied() as planned:
            return watch(planned, example, workspace)[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON types.

        Returns:
            Its fields.
        """
        shown = ("memory", "predicted", "plain", "moment", "flops", "folder")
        return {
            "format": self.FORMAT,
            **{name: getattr(self, name) for name in shown},
            "config": None if self.config is None else self.config.to_saved(),
            "blocks": [*map(asdict, self.blocks)],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan.

        Args:
            path: A JSON file.
        """
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> BlockPlan:
        """Make a plan of what :meth:`to_dict` returned, the format left out.

        Args:
            fields: Plain JSON types.

        Returns:
            The plan.

        Raises:
            ValueError: If a choice is unknown.
        """
        blocks = [PlannedBlock(**{**block, "inner": tuple(block["inner"])}) for block in fields.pop("blocks")]
        unknown = {block.choice for block in blocks} - {*CHOICES}
        if unknown:
            raise ValueError(f"choices must be of {', '.join(CHOICES)}, got {', '.join(sorted(unknown))}")
        config = fields.pop("config", None)
        return cls(blocks=blocks, config=None if config is None else RMMConfig.from_dict(config), **fields)

"""Memory of a training process at the peak of a step: what is there before the step, and what the step makes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rmm_linear._support.reports import Report
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import keyed, table, wrapped
from rmm_linear.fitting.static_memory import StaticMemory
from rmm_linear.memory.peak import GRADIENTS, RECOMPUTED, SAVED, TEMPORARY, Peak
from rmm_linear.planning.step.sharded import is_sharded
from rmm_linear.planning.step.watch import watch

OPTIMIZER_STEP = "optimizer's step"
LABELS = {
    "optimizer": "the optimizer's state",
    "ddp_buckets": "DDP's buckets",
    "in_its_step": "the optimizer's step",
    SAVED: "saved for the backward pass",
    RECOMPUTED: "recomputed for it",
    TEMPORARY: "temporary results",
}


@dataclass(frozen=True, repr=False)
class StepMemory(Report):
    """Memory of a training process at the peak of a step.

    Attributes:
        static: Bytes in addition to a step.
        passes: The peak of the forward and backward pass, without what is there before.
        accumulates: Whether the gradients of earlier batches are there too.
    """

    static: StaticMemory
    passes: Peak = field(default_factory=Peak)
    accumulates: bool = False

    @property
    def gradients(self) -> int:
        """Bytes of the parameters' gradients at the peak of the forward and backward pass."""
        return self.static.gradients if self.accumulates else self.passes.by_kind.get(GRADIENTS, 0)

    @property
    def activations(self) -> int:
        """Bytes of activations and temporary results at the peak of the forward and backward pass."""
        return self.passes.bytes - self.passes.by_kind.get(GRADIENTS, 0)

    @property
    def step(self) -> int:
        """Bytes at the peak of the forward and backward pass."""
        return self.static.before_step + self.gradients + self.activations

    @property
    def peak(self) -> int:
        """Bytes at the peak of a step, or of the optimizer's step, if that takes more."""
        return max(self.step, self.static.in_optimizer_step)

    @property
    def is_optimizer(self) -> bool:
        """Whether the peak is in the optimizer's step."""
        return self.static.in_optimizer_step >= self.step

    @property
    def moment(self) -> str:
        """Where the peak is: "forward of encoder.layer.0", "backward of ...", or "optimizer's step"."""
        return OPTIMIZER_STEP if self.is_optimizer else self.passes.moment

    def parts(self) -> dict[str, int]:
        """Return the bytes by part; "in_its_step" are temporary results of the optimizer, where its step takes most."""
        static, made = self.static, dict.fromkeys((SAVED, RECOMPUTED, TEMPORARY), 0)
        found = {"parameters": static.parameters, "buffers": static.buffers, "optimizer": static.optimizer}
        found |= {"ddp_buckets": static.ddp_buckets}
        if self.is_optimizer:
            return found | {
                "gathered": 0,
                "in_its_step": static.optimizer_transient,
                "gradients": static.gradients,
                **made,
            }
        made |= {kind: size for kind, size in self.passes.by_kind.items() if kind != GRADIENTS}
        return found | {"gathered": static.gathered, "in_its_step": 0, "gradients": self.gradients, **made}

    @property
    def by_pass(self) -> dict[str, tuple[int, str]]:
        """Return, for the forward pass, the backward pass and so on, its own peak in bytes and the module where it is.

        "recomputation" is the part of the backward pass that runs modules again; "optimizer" is its own step.
        """
        before = self.static.before_step + (self.static.gradients if self.accumulates else 0)
        found = {name: (before + size, module) for name, (size, module) in self.passes.by_pass.items()}
        return {**found, "optimizer": (self.static.in_optimizer_step, "")}

    def summary(self) -> str:
        """Return the peak, and where it is, in one line."""
        return keyed("rmm_linear simulate:", (f"peak={show_bytes(self.peak)}", f"in the {self.moment}"))

    def _text(self, *, is_whole: bool) -> str:
        return f"{self.summary()}\n\n{self.tables(is_whole=is_whole)}"

    def tables(self, *, is_whole: bool) -> str:
        """Return tables of the parts, and of the tensors that live at the peak of the forward and backward pass."""
        rows = [
            (LABELS.get(name, name), show_bytes(size), f"{100 * size / max(self.peak, 1):.1f}")
            for name, size in self.parts().items()
            if size
        ]
        passes = ", ".join(
            f"{name} {show_bytes(size)}{f' in {module}' if module else ''}"
            for name, (size, module) in self.by_pass.items()
        )
        said = [wrapped(f"Peaks by pass: {passes}.", 2)]
        if self.passes.alive:
            said.append(
                f"At the peak of the forward and backward pass, {show_bytes(self.passes.bytes)} are of the step:"
            )
        found = [table((f"in the {self.moment}", "bytes", "%"), [*rows, ("peak", show_bytes(self.peak), "")])]
        found += ["\n".join(said), self.passes.live_table(is_whole=is_whole) if self.passes.alive else ""]
        return "\n\n".join(filter(None, found))

    def _records(self) -> list[dict[str, Any]]:
        return [{"part": name, "bytes": size} for name, size in self.parts().items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types; all numbers are bytes.

        Returns:
            peak, and moment, where it is; parts, whose sum it is; passes: the process's peak in each pass, with its
            module; static: what is there in addition to a step; and of the peak of the forward and backward pass, which
            is another one if the optimizer's step takes most, by_module, by_kind, alive and largest, as
            :meth:`rmm_linear.memory.Peak.to_dict` has them.
        """
        of_step = self.passes.to_dict()
        return {
            "peak": self.peak,
            "moment": self.moment,
            "parts": self.parts(),
            "passes": {name: {"bytes": size, "module": module} for name, (size, module) in self.by_pass.items()},
            "static": self.static.to_dict(),
            **{name: of_step[name] for name in ("by_kind", "by_module", "alive", "largest")},
        }


def step_memory(model: nn.Module, example: Any, static: StaticMemory, *, accumulate: bool = False) -> StepMemory:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    passes = watch(inner, example, held=(lambda parameter: 0) if accumulate else None)[0]
    static = replace(static, gathered=0) if is_sharded(inner) else static  # what is gathered is in the step
    return StepMemory(static, passes, accumulate)

"""A plan for the blocks of a model, as data: print it, save it, apply it, revert it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from rmm_linear._support.fields import check_least, read_fields
from rmm_linear._support.provided import provided
from rmm_linear._support.saved_settings import SavedSettings
from rmm_linear._support.sizes import show_bytes
from rmm_linear._support.tables import grouped, keyed, named_table, wrapped
from rmm_linear.context.checkpointing import KEEP as KEEP_CHECKPOINTS
from rmm_linear.context.checkpointing import check_checkpointing
from rmm_linear.memory.peak import Peak
from rmm_linear.planning.plans import Plan, apply
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import Workspace

# The words of a choice, in its order; with more than one of them, " + " is between.
KEEP, RECOMPUTE, SELECTIVE, ATTENTION, NESTED = "keep", "recompute", "selective", "attention", "nested"
CONVERT, OFFLOAD, TILE = "convert", "offload", "tile"
CHOICES = (KEEP, RECOMPUTE, SELECTIVE, ATTENTION, NESTED, CONVERT, OFFLOAD, TILE)
RECOMPUTATIONS = (RECOMPUTE, SELECTIVE, ATTENTION, NESTED)
_AND = " + "
# How a report names what fit chooses; files, csv and arguments have the short names.
_LABELS = {
    CONVERT: "compress",
    ATTENTION: "recompute all but attention",
    f"{CONVERT} linears": "compress linears only",
    f"{CONVERT} others": "compress all but linears",
    f"{CONVERT} wide": "compress, 8 bits",
    f"{CONVERT} tenth": "compress, 3 bits",
    f"{CONVERT} narrow": "compress, 1.6 bits",
}
_LEGEND = "saved: for the backward pass; peak: while in the block, without what the blocks before it save"
APPLIED = "rmm_applied"  # attribute of a model with a plan: the handle by which rmm_linear.revert undoes it


@dataclass(frozen=True)
class PlannedBlock:
    """The choice for a block.

    Attributes:
        name: The block.
        choice: "keep", or one or more words, as in "recompute + offload". At most one of "recompute"; "selective": all
            but the results of products is recomputed; "attention": all but those of attention; "nested": recomputed,
            and its parts again one by one. "convert": it saves compressed activations; with "recompute", while it is
            recomputed. "offload": what it saves waits in host memory, or in files. "tile": its position-wise modules
            run in slices of the sequence.
        kept: Bytes that it saves for the backward pass, as the solver counts them.
        worst: Peak in bytes while in the block, without what the blocks before it save.
        host: Bytes that wait in host memory, or in files.
        seconds: Time that is added to a step.
        inner: The parts of a nested block.
        setting: Name of a converted block's setting.
        noise: Variance that compression adds to the gradient of its parameters, divided by the whole gradient's D²_SGD.
        rows: Of a slice of a tiled block.
    """

    name: str
    choice: str
    kept: int = 0
    worst: int = 0
    seconds: float = 0.0
    inner: tuple[str, ...] = ()
    setting: str = ""
    noise: float = 0.0
    host: int = 0
    rows: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the choice."""
        return tuple(self.choice.split(_AND))

    @property
    def recomputation(self) -> str:
        """The word that says how it is recomputed; "" where it is not."""
        return next((word for word in self.words if word in RECOMPUTATIONS), "")

    @property
    def option(self) -> str:
        """The choice, and the setting of a converted block."""
        return joined(f"{word} {self.setting}".rstrip() if word == CONVERT else word for word in self.words)

    def adding(self, word: str, **known: Any) -> PlannedBlock:
        """Return the row with another word in its choice, and with other fields."""
        words = {*self.words, word} - {KEEP}
        return replace(self, choice=joined(one for one in CHOICES if one in words), **known)

    def check(self) -> None:
        """Check that the words of the choice can be applied together; raises ValueError."""
        for word in self.words:
            if word not in CHOICES:
                raise ValueError(
                    f"choice must be one of {', '.join(CHOICES)}, with {_AND!r} between several, got {self.choice!r}"
                )
        others = [word for word in self.words if word in RECOMPUTATIONS and word != RECOMPUTE]
        together = len(others) + (RECOMPUTE in self.words) > 1 or (others and CONVERT in self.words)
        if together or len({*self.words}) < len(self.words) or (KEEP in self.words and len(self.words) > 1):
            raise ValueError(
                f"choice must have each word once, {KEEP} alone, one of {', '.join(RECOMPUTATIONS)} at most, and "
                f"{CONVERT} with none of them but {RECOMPUTE}, got {self.choice!r}"
            )


def joined(words: Iterable[str]) -> str:
    """Make a choice of words."""
    return _AND.join(words)


def label_of(option: str) -> str:
    """Return the words for an option or a choice in a report."""
    return joined(_LABELS.get(word, word) for word in option.split(_AND))


@dataclass(frozen=True, repr=False)
class BlockPlan(Plan):
    """The choice for every block of a model: save, recompute, compress or offload its activations.

    Attributes:
        blocks: In the order of the forward pass.
        memory: The budget in bytes.
        predicted: Peak of a step with the plan, simulated.
        plain: Peak of a step without it, simulated.
        moment: When the peak is.
        flops: Operations of a step, relative to one without the plan; None if they were not counted.
        config: The conversion of the converted blocks, which leaves all others alone.
        folder: Where offloaded blocks of a model on the CPU write files.
        checkpointing: "replace" turns activation checkpointing of the model off as long as the plan is applied, "keep"
            leaves it.
        peak: Memory over the step that was simulated when the plan was made.
        note: What to know of how it was made.
    """

    FORMAT: ClassVar[str] = "rmm_linear block plan 2"

    blocks: Sequence[PlannedBlock]
    memory: int = 0
    predicted: int = 0
    plain: int = 0
    moment: str = ""
    flops: float | None = None
    config: SavedSettings | None = None
    folder: str | None = None
    checkpointing: str = KEEP_CHECKPOINTS
    peak: Peak | None = field(default=None, compare=False)
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def _text(self, *, is_whole: bool) -> str:
        said = [wrapped(f"Note: {self.note}")] if self.note else []
        return "\n".join([self.summary(), self.block_table(is_whole=is_whole), *said])

    def block_table(self, *, is_whole: bool = False, has_noise: bool = False) -> str:
        """Return the table of the blocks alone.

        Args:
            is_whole: Whether every block has a row; else those of one choice whose names differ in numbers share one.
            has_noise: Whether the variance that compression adds is shown, by that of the whole gradient's minibatch.

        Returns:
            A table in which bytes saved, seconds and variances are sums, and the peak is the highest.
        """
        by_name = {block.name: block for block in self.blocks}
        rows = [(block.name, label_of(block.option)) for block in self.blocks]
        groups = [(name, [name], (option,)) for name, option in rows] if is_whole else grouped(rows)
        cells = list[tuple[str, ...]]()
        for pattern, names, (option,) in groups:
            blocks = [by_name[name] for name in names]
            saved, worst = sum(one.kept for one in blocks), max(one.worst for one in blocks)
            sums = (sum(one.seconds for one in blocks), sum(one.noise for one in blocks) if has_noise else 0.0)
            added = (f"{one:.2g}" if one else "" for one in sums)
            cells.append((pattern, option, show_bytes(saved), show_bytes(worst), *added))
        return named_table(("block", "choice", "saved", "peak", "s added", "ratio"), cells) + f"\n{_LEGEND}"

    def _records(self) -> list[dict[str, Any]]:
        return [asdict(block) for block in self.blocks]

    def summary(self) -> str:
        """Return the plan in one line, or two of 100 columns."""
        counts = Counter(block.choice for block in self.blocks)
        order = sorted(counts, key=lambda choice: [CHOICES.index(word) for word in choice.split(_AND)])
        parts = [f"{label_of(choice)}={counts[choice]}" for choice in order]
        parts.append(f"peak {show_bytes(self.predicted)} of {show_bytes(self.plain)},")
        parts.append(f"budget {show_bytes(self.memory)},")
        parts += [] if self.flops is None else [f"operations × {self.flops:.3f},"]
        return keyed("rmm_linear plan:", [*parts, self.moment])

    @property
    def seconds(self) -> float:
        """Time that is added to a step."""
        return sum(block.seconds for block in self.blocks)

    @property
    def host(self) -> int:
        """Bytes that wait in host memory, or in files."""
        return sum(block.host for block in self.blocks)

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
        if self.is_applied:
            raise ValueError("The plan is applied already. Use plan.revert() first.")
        return apply(self, self._given(model)).model

    @property
    def is_applied(self) -> bool:
        """Whether a model trains by the plan."""
        return self._applied is not None

    @property
    def conversion(self) -> Any:
        """The report of :func:`rmm_linear.convert` when the plan was applied; None where it is not, or has none."""
        return getattr(self._applied, "conversion", None)

    @property
    def _applied(self) -> Any:
        found = None if self._model is None else vars(self._model).get(APPLIED)
        return found if found is not None and found.plan is self else None

    def revert(self) -> None:
        """Undo :meth:`apply`."""
        if self.is_applied:
            self._applied.revert()

    def undo_later(self, executor: Any) -> None:
        """Detach an executor when the applied plan is reverted, after all others."""
        self._applied.undo_later(executor)

    @contextmanager
    def applied(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """Apply the plan inside the block, if it is not applied already.

        Args:
            model: As for :meth:`apply`.

        Yields:
            The model.
        """
        if self.is_applied:
            yield self._given()
        else:
            with apply(self, self._given(model)) as planned:
                yield planned

    def simulated(self, example: Any, workspace: Workspace | None = None) -> Peak:
        """Return the peak of a step with the plan, as :func:`rmm_linear.planning.simulate` does.

        Args:
            example: A training batch.
            workspace: Bytes that operators take beyond their results.

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
        shown = ("memory", "predicted", "plain", "moment", "flops", "folder", "checkpointing")
        return {
            "format": self.FORMAT,
            **{name: getattr(self, name) for name in shown},
            "config": None if self.config is None else self.config.to_saved(),
            "blocks": [*map(asdict, self.blocks)],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> BlockPlan:
        """Make a plan of what :meth:`to_dict` returned, the format left out.

        Args:
            fields: Plain JSON types.

        Returns:
            The plan.

        Raises:
            ValueError: If a field is missing, or has a wrong type or value.
        """
        others = {name: value for name, value in fields.items() if name != "config"}
        plan, config = read_fields(cls, others), fields.get("config")
        check_least(plan, 0, "memory", "predicted", "plain", "flops")
        for block in plan.blocks:
            check_least(block, 0, "kept", "noise", "host", "rows")
            if NESTED in block.words and not block.inner:
                raise ValueError(f"{block.name} is nested, and must have inner parts, got none")
        plan = plan if config is None else replace(plan, config=provided(CONVERT).read(config))
        plan.check()
        return plan

    def check(self) -> None:
        """Check that the choices can be applied together.

        Raises:
            ValueError: If a choice is unknown or lacks what it needs, or a block has two rows.
        """
        check_checkpointing(self.checkpointing)
        for block in self.blocks:
            block.check()
        names = [name for block in self.blocks for name in (block.name, *block.inner)]
        if len({*names}) != len(names):
            raise ValueError(f"blocks must have one row each, got {Counter(names).most_common(1)[0][0]!r} twice")
        if (self.config is not None) != any(CONVERT in block.words for block in self.blocks):
            raise ValueError(f"config must be there where a block is converted, and only there, got {self.config!r}")

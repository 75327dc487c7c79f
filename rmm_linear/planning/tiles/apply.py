"""Run the position-wise modules of a model in slices: the public call, its report, and the handle that undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rmm_linear._support.patterns import matches
from rmm_linear._support.reports import Report
from rmm_linear._support.tables import grouped, keyed, named_table
from rmm_linear._support.validation import check_integer, did_you_mean, read_names
from rmm_linear.planning.budget import check_model
from rmm_linear.planning.tiles.find import find_tiles
from rmm_linear.planning.tiles.tile import ROWS, ROWS_OF_ACCELERATORS, Tile

TILED = "rmm_tiled"  # attribute of a model with tiles: the handle by which rmm_linear.revert undoes them
_PLANNED = "rmm_applied"  # the same of a plan


@dataclass(frozen=True, repr=False)
class TileReport(Report):
    """The result of :func:`rmm_linear.tile`.

    Attributes:
        rows: Rows of a slice; None for the default of the device of a call.
        tiled: Name to "norm", "experts" or how many linear layers are inside, for everything that runs in slices.
        refused: Name to the reason, for modules whose code runs linear layers and cannot run in slices.
    """

    rows: int | None
    tiled: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the report's first line.

        Returns:
            One line of ``key=value`` pairs behind ``rmm_linear:``.
        """
        norms, experts = (sum(kind == one for kind in self.tiled.values()) for one in ("norm", "experts"))
        rows = f"{ROWS['cpu']} on a CPU, {ROWS_OF_ACCELERATORS} elsewhere" if self.rows is None else self.rows
        counts = {"tiled": len(self.tiled), "norms": norms, "experts": experts}
        counts |= {"others": len(self.tiled) - norms - experts, "refused": len(self.refused)}
        return keyed("rmm_linear:", (*(f"{name}={count}" for name, count in counts.items()), f"rows={rows}"))

    def __str__(self) -> str:
        """Return the summary line, and what runs in slices and what does not; numbered siblings share a row."""
        rows = [(pattern, str(len(names)), *cells) for pattern, names, cells in grouped(self._rows())]
        return f"{self.summary()}\n{named_table(('module', 'count', 'runs'), rows)}"

    def table(self) -> str:
        """Return the same with a row for every module.

        Returns:
            Text.
        """
        return f"{self.summary()}\n{named_table(('module', 'runs'), self._rows())}"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(name, f"in slices: {kind}") for name, kind in self.tiled.items()]
        return rows + [(name, f"as a whole: {reason}") for name, reason in self.refused.items()]

    def _records(self) -> list[dict[str, Any]]:
        return [{"module": name, "runs": runs} for name, runs in self._rows()]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types.

        Returns:
            A dictionary with the keys rows, tiled and refused.
        """
        return {"rows": self.rows, "tiled": dict(self.tiled), "refused": dict(self.refused)}


class AppliedTiles:
    """A model whose tiles are attached, until it is reverted."""

    def __init__(self, model: nn.Module, tiles: Sequence[Tile]) -> None:
        self.model, self.tiles = model, list(tiles)
        for each in self.tiles:
            each.attach()
        vars(model)[TILED] = self

    def revert(self) -> None:
        if vars(self.model).get(TILED) is self:
            del vars(self.model)[TILED]
        while self.tiles:
            self.tiles.pop().detach()


def tiles_of(module: nn.Module, rows: int | None = None) -> list[Tile]:
    """Make the tiles of a block, for a plan to attach; the second search through modules that are alike is quick."""
    return [
        Tile(module.get_submodule(found.name), rows, found.method, found.parts) for found in find_tiles(module).tiles
    ]


def tile(model: nn.Module, rows: int | None = None, modules: str | Sequence[str] | None = None) -> TileReport:
    """Run the position-wise modules of a model in slices of the sequence, forward and backward.

    Norms, dense and gated MLPs, experts and projections with adapters then need memory for the intermediate results of
    one slice, whatever the length of the sequence; inputs, outputs and their gradients stay whole. Modules are found by
    what they compute, and attention and all else that mixes positions runs as before. Outputs and gradients of inputs
    are the same to the bit on a CPU; gradients of parameters are the same up to the order of sums, which are made in
    float32. Dropout draws its numbers slice by slice, so it draws others than without slices.

    Time: the forward pass of what is tiled runs twice, about a quarter more for an MLP that is not recomputed anyway.
    Where the modules inside are converted, they run once, and save their codes slice by slice.

    What a module computes is tried on few rows, and its operators are compared with those on many; code that decides
    by values what it does may go unnoticed: leave such modules out by ``modules``.

    ``rmm_linear.revert(model)`` undoes it. Use it before a plan is applied; before or after ``convert``,
    ``get_peft_model``, ``fully_shard`` and DistributedDataParallel.

    Args:
        model: A model, also one without weights (on the meta device).
        rows: Rows of a slice, of all sequences together: tokens. None is 1,024 on a CPU and 4,096 elsewhere. Modules
            that get no more rows than that run as before.
        modules: Which of the modules that are found to take: a regular expression for their names, or a list of names
            and dotted suffixes; None for all.

    Returns:
        What runs in slices, and what does not and why. Print it.

    Raises:
        TypeError: If ``model`` is no module, ``rows`` no integer, or ``modules`` no pattern.
        ValueError: If nothing is found or selected, or the model has tiles or a plan already.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> print(tile(nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": mlp}), rows=256).summary())
        rmm_linear: tiled=2 norms=1 experts=0 others=1 refused=0 rows=256
    """
    check_model(model)
    check_integer("rows", rows, optional=True)
    patterns = None if modules is None else read_names("modules", modules)
    for name, made, remedy in ((TILED, "tiles", ""), (_PLANNED, "a plan", ", and apply the plan after the tiles")):
        if any(name in vars(part) for part in model.modules()):
            raise ValueError(
                f"tile takes a model without tiles or a plan, got one with {made} already. "
                f"Call rmm_linear.revert(model) first{remedy}."
            )
    found = find_tiles(model)
    if not found.tiles:
        reasons = "".join(f" {name or 'The model'}: {reason}." for name, reason in [*found.refused.items()][:3])
        raise ValueError(
            "tile needs a norm, experts or a module with two linear layers that treats every position by itself, got a "
            f"model without one.{reasons} Pass a model with such modules."
        )
    names = [one.label for one in found.tiles]
    chosen = [one for one in found.tiles if patterns is None or matches(patterns, one.label)]
    if not chosen:
        near = did_you_mean(modules if isinstance(modules, str) else next(iter(modules or ())), names)
        raise ValueError(
            f"modules must match one of the {len(names)} modules that can run in slices, got {modules!r}, which "
            f"matches none of {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}.{near}"
        )
    AppliedTiles(model, [Tile(model.get_submodule(one.name), rows, one.method, one.parts) for one in chosen])
    return TileReport(rows, {one.label: one.kind for one in chosen}, found.refused)

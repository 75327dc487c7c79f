"""Tile: the executor that runs a position-wise module in slices of its rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from rmm_linear.context.surroundings import in_backward, is_checkpointed
from rmm_linear.context.unmasked import unmasked
from rmm_linear.layers.converted import ConvertedModule
from rmm_linear.memory.peak import LiveTensors
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.replay.wrapped import detached
from rmm_linear.planning.tiles.function import CodedTile, RepeatedTile, TileCall
from rmm_linear.planning.tiles.sampled import SampledSlices
from rmm_linear.planning.tiles.slices import Streams, streams_of

logger = logging.getLogger(__name__)

# Rows of a slice. A weight is read once per slice: with M rows, a product in 16 bits makes M operations for each byte
# of it, and accelerators make 150 to 300 in the time of a byte. So 4,096 rows are bound by arithmetic, with room for
# weights that are cast or gathered per slice. A core of a CPU makes some 20 operations in that time.
ROWS = {"cpu": 1024}
ROWS_OF_ACCELERATORS = 4096


class Tile:
    """The forward pass of a module, or another method of it, in slices of the rows that it is given.

    It takes the place of the method. Hooks of the module itself run once; those of modules inside of it run once per
    slice, forward, and again backward. Of what the method makes, a slice's part is there at a time, and the outputs.
    Calls with no more rows than one slice run as if there were no tile.

    Where modules inside save compressed activations, every slice runs once and keeps its codes; padding is not left
    out of them.
    """

    def __init__(
        self, module: nn.Module, rows: int | None = None, method: str = "forward", parts: Sequence[str] | None = None
    ) -> None:
        """Wrap a method, for :meth:`attach`."""
        self.module, self.rows, self.method = module, rows, method
        self.parts = None if parts is None else tuple(parts)
        self.replaced: Any = None  # by another library, or a plan
        self.is_off = False  # detached, and still inside of what others put around it
        self._said = False

    @property
    def inner(self) -> Callable[..., Any]:
        """The module's own method; looked up at each call, so that copies and pickled models have their own."""
        own = getattr(type(self.module), self.method)
        return MethodType(own, self.module) if self.replaced is None else self.replaced

    @property
    def follows_class(self) -> bool:
        """Whether it runs the method of the class that the module has at the time of a call."""
        return self.replaced is None or bool(getattr(self.replaced, "follows_class", False))

    def __getattr__(self, name: str) -> Any:
        """Have the signature of the method: callers look there for what it takes."""
        if name == "__signature__":
            return inspect.signature(self.inner)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def attach(self) -> None:
        self.replaced, self.is_off = vars(self.module).get(self.method), False
        setattr(self.module, self.method, self)

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        detached(self, self.module, self.method, self.replaced)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method in slices, and again in the backward pass."""
        if self.is_off:
            return self.inner(*args, **kwargs)
        return _uncompiled(self, args, kwargs)

    def _roots(self) -> list[nn.Module]:
        """Return the modules whose parameters the method reads."""
        return [self.module] if self.parts is None else [self.module._modules[name] for name in self.parts]  # pyright: ignore

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        rows = ROWS.get(device, ROWS_OF_ACCELERATORS) if self.rows is None else self.rows
        found = streams_of(leaves, rows)
        roots = self._roots()
        inside = [part for root in roots for part in root.modules()]
        converted = [part for part in inside if isinstance(part, ConvertedModule)]
        if isinstance(found, str) or any(part.rmm_operation == "logits" for part in converted):
            self._say(found if isinstance(found, str) else "makes logits in chunks already")
            found = None
        if found is None:
            return self.inner(*args, **kwargs)

        # Without the tensors, which the graph would hold by it: only what autograd saves may be offloaded.
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def run(parts: Sequence[Tensor]) -> Any:
            given = list(rest)
            for number, part in zip((*found.streams, *found.others), parts, strict=True):
                given[number] = part
            args, kwargs = tree_unflatten(given, structure)
            return self.inner(*args, **kwargs)

        return self._in_slices(run, found, leaves, roots, converted)

    def _in_slices(
        self,
        run: Callable[[Sequence[Tensor]], Any],
        found: Streams,
        leaves: Sequence[Any],
        roots: Sequence[nn.Module],
        converted: Sequence[ConvertedModule],
    ) -> Any:
        tensors = [leaves[number] for number in (*found.streams, *found.others)]
        own = [] if self.parts is None else [*self.module.parameters(recurse=False)]
        trained = [one for one in (*own, *(p for root in roots for p in root.parameters())) if one.requires_grad]
        trained = [*{id(one): one for one in trained}.values()]
        is_recorded = torch.is_grad_enabled() and any(one.requires_grad for one in (*tensors, *trained))
        # What activation checkpointing drops, or has dropped, is exact, and is not to be kept by slices either.
        is_exact = is_checkpointed() or in_backward()
        is_coded = any(one.training and (not is_exact or one.rmm_config.checkpointed != "exact") for one in converted)
        repeated = None
        if is_recorded and not is_coded:
            repeated = Replayed([self.module] if self.parts is None else roots, tensors, draws=True)
        name = f"{type(self.module).__name__}{'' if self.method == 'forward' else f'.{self.method}'}"
        cut, sampled, live = found.cut, None, _simulation(tensors)
        if live is not None and is_recorded and is_coded:
            cut, more = cut.kinds()
            sampled = SampledSlices(more, tensors, live)
        elif live is not None:
            cut = cut.sample()
        call = TileCall(run, cut, len(found.streams), len(found.others), repeated, name, sampled)
        with unmasked(converted) if converted else nullcontext():
            if is_recorded:
                wholes = (CodedTile if is_coded else RepeatedTile).apply(call, *tensors, *trained)
            else:
                with torch.no_grad():
                    wholes = call.outputs(tensors)
        return call.output(wholes)

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.warning("%s runs as a whole, and not in slices: it %s.", type(self.module).__name__, why)


def _simulation(tensors: Sequence[Tensor]) -> LiveTensors | None:
    """Return what counts live bytes, if nothing else is asked for, of tensors without values."""
    if not any(isinstance(one, FakeTensor) for one in tensors):
        return None
    modes = _get_current_dispatch_mode_stack()
    if any(type(mode).__module__ == FlopCounterMode.__module__ for mode in modes):
        return None
    return next((mode for mode in modes if isinstance(mode, LiveTensors)), None)


def _run(tile: Tile, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tile._run(args, kwargs)


_uncompiled: Any = torch.compiler.disable(_run)  # what a repetition needs is nothing for a compiler to trace

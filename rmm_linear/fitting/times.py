"""Benchmark every option on one representative block per kind."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from rmm_linear.memory.inputs import call_with
from rmm_linear.planning.blocks.find import alike
from rmm_linear.planning.blocks.plan import CONVERT, BlockPlan, PlannedBlock
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.step.step import as_in_training, copied

_ROUNDS, _MORE_ROUNDS, _SPREAD = 3, 4, 0.1  # more where the ratios of an option lie further apart
_REPEATS, _LONG = 10, 0.02  # in a round, a block that takes less than so many seconds runs up to so often

Make = Callable[[PlannedBlock], BlockPlan]


@dataclass(frozen=True)
class Times:
    """Seconds of blocks.

    Attributes:
        plain: Block to the seconds of its forward and backward pass.
        extra: Block and option to the seconds that the option adds; negative where it saves some.
    """

    plain: dict[str, float]
    extra: dict[tuple[str, str], float]


def time_options(model: nn.Module, example: Any, options: Mapping[str, Sequence[PlannedBlock]], make: Make) -> Times:
    """Time the forward and backward pass of one block of each kind, with each of its options in turn.

    Blocks are alike that have one class, one set of parameters' shapes, and inputs of one shape. All options of a block
    run in every round, and the median of the rounds' ratios counts, so that what else the machine does matters little;
    where the rounds disagree, there are more of them. ``make`` makes the plan in which one block alone has an option.
    """
    calls = _calls(model, example, list(options))
    kinds: dict[str, list[str]] = {}
    for name in options:
        kinds.setdefault(f"{alike(model, name)} {_shapes(calls.get(name))} {_names(options[name])}", []).append(name)
    plain, extra = dict[str, float](), dict[tuple[str, str], float]()
    with as_in_training(model):
        for names in kinds.values():
            call = calls.get(names[0])
            seconds = {} if call is None else _rounds(model, call, options[names[0]], make)
            base = seconds.pop("", 0.0)
            for name in names:
                plain[name] = base
                extra |= {(name, option): value - base for option, value in seconds.items()}
    return Times(plain, extra)


@dataclass
class _TimedCall:
    module: nn.Module
    args: Any
    kwargs: Any
    around: Replayed

    def run(self) -> None:
        """Run both passes of the module by itself; its parameters' gradients are dropped."""
        leaves, form = tree_flatten((self.args, self.kwargs))
        leaves = [_own(leaf) for leaf in leaves]
        first = next((place for place, leaf in enumerate(leaves) if _is_float(leaf)), None)
        if first is not None:
            leaves[first] = leaves[first].requires_grad_().clone()  # which may be changed in place
        args, kwargs = tree_unflatten(leaves, form)
        with self.around.autocast():
            output = self.module(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(leaf) for leaf in outputs])
        for parameter in self.module.parameters():
            parameter.grad = None


def _own(leaf: Any) -> Any:
    """Return an argument for one call: what a block fills, as a cache of keys and values, is empty for the next one."""
    if isinstance(leaf, Tensor):
        return leaf.detach()
    try:
        return leaf if isinstance(leaf, nn.Module) else copy.deepcopy(leaf)
    except Exception:  # of any class; what cannot be copied is shared
        return leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _rounds(model: nn.Module, call: _TimedCall, options: Sequence[PlannedBlock], make: Make) -> dict[str, float]:
    """Map options to seconds; "" to those of the block as it is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found: dict[str, list[float]] = {"": [], **{option.option: [] for option in options}}

    def once() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        call.run()
        _synchronize(device)
        return time.perf_counter() - begin

    once()  # what is made once
    repeats = max(1, min(_REPEATS, int(_LONG / max(once(), 1e-6))))

    def timed() -> float:
        once()  # what a conversion makes in its first call
        return min(once() for _ in range(repeats))

    for done in range(_ROUNDS + _MORE_ROUNDS):
        if done >= _ROUNDS and all(_agree(seconds, found[""]) for seconds in found.values()):
            break
        found[""].append(timed())
        for option in options:
            with make(option).applied():
                found[option.option].append(timed())
    base = statistics.median(found[""])
    by_plain = {name: statistics.median(_ratios(seconds, found[""])) for name, seconds in found.items()}
    # What does more than the exact block cannot be faster, whatever else the machine did meanwhile.
    known = {option.option for option in options if option.choice != CONVERT}
    return {name: base * (max(ratio, 1.0) if name in known else ratio) for name, ratio in by_plain.items()}


def _ratios(seconds: Sequence[float], plain: Sequence[float]) -> list[float]:
    return [one / exact for one, exact in zip(seconds, plain, strict=True)]


def _agree(seconds: Sequence[float], plain: Sequence[float]) -> bool:
    """Say whether the rounds agree on an option: nothing else took the machine's time in some of them."""
    ratios = _ratios(seconds, plain)
    return max(ratios) - min(ratios) <= _SPREAD * statistics.median(ratios)


def _synchronize(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


def _calls(model: nn.Module, example: Any, names: Sequence[str]) -> dict[str, _TimedCall]:
    """Return the arguments of every block's first call, in a pass that saves nothing."""
    found: dict[str, _TimedCall] = {}
    handles = []
    for name in names:
        module = model.get_submodule(name)

        def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in found:
                args, kwargs = tree_map(_own, (args, kwargs))
                tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
                found[name] = _TimedCall(module, args, kwargs, Replayed(arguments=tensors))

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        with as_in_training(model), torch.no_grad():
            call_with(model, copied(example))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _shapes(call: _TimedCall | None) -> list[Any]:
    if call is None:
        return []
    return [tuple(leaf.shape) for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]


def _names(options: Sequence[PlannedBlock]) -> list[str]:
    return [option.option for option in options]

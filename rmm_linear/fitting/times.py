"""Benchmark every option on one representative block per kind.

On CUDA the host issues a step's work while the device does it, so a step takes the longer of both times: of its blocks'
host times, or of their device times, added up. Both are measured. An option counts by the time that binds a step in
which all blocks have it, so the estimate is right for a plan of one option, and for a mixed one an upper bound, since
the larger of two sums is convex.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from rmm_linear._support.progress import counting
from rmm_linear.memory.inputs import call_with
from rmm_linear.planning.blocks.find import alike
from rmm_linear.planning.blocks.plan import CONVERT, BlockPlan, PlannedBlock
from rmm_linear.planning.replay.replayed import Replayed
from rmm_linear.planning.step.step import as_in_training, copied

ROUNDS, MORE_ROUNDS, _SPREAD = 3, 4, 0.1  # more where the ratios of an option lie further apart
REPEATS, LONG = 10, 0.02  # in a round, a block that takes less than so many seconds runs up to so often
_CYCLES = 2e9  # per second, more than accelerators have

Make = Callable[[PlannedBlock], BlockPlan]


@dataclass(frozen=True)
class Times:
    """Seconds of blocks."""

    plain: dict[str, float]  # block to the seconds of its forward and backward pass
    # Block and option to the seconds that the option adds; negative where it saves some
    extra: dict[tuple[str, str], float]


class Seconds(NamedTuple):
    """Of both passes of a block: to issue its work, and to do it; on a CPU, both are the time of a call."""

    host: float
    device: float


def time_options(
    model: nn.Module,
    example: Any,
    options: Mapping[str, Sequence[PlannedBlock]],
    make: Make,
    *,
    rounds: tuple[int, int] | None = None,
) -> Times:
    """Time the forward and backward pass of one block of each kind, with each of its options in turn.

    Blocks are alike that have one class, one set of parameters' shapes, and inputs of one shape. All options of a block
    run in every round, and the median of the rounds' ratios counts, so that what else the machine does matters little;
    where the rounds disagree, there are more of them; ``rounds`` says how many, and how many more. ``make`` makes the
    plan in which one block alone has an option.
    What does more than the exact block cannot be faster, whatever else the machine did meanwhile.
    """
    calls = _calls(model, example, list(options))
    kinds: dict[str, list[str]] = {}
    for name in options:
        kinds.setdefault(f"{alike(model, name)} {_shapes(calls.get(name))} {_names(options[name])}", []).append(name)
    found: dict[str, dict[str, Seconds]] = {}
    with as_in_training(model), counting("timing options", len(kinds)) as begins:
        for names in kinds.values():
            begins(names[0])
            call = calls.get(names[0])
            seconds = {"": Seconds(0.0, 0.0)}
            if call is not None:
                seconds = _rounds(model, call, options[names[0]], make, *(rounds or (ROUNDS, MORE_ROUNDS)))
            found |= dict.fromkeys(names, seconds)
    binding = {option: _binding(found, option) for seconds in found.values() for option in seconds}
    plain = {name: seconds[""][binding[""]] for name, seconds in found.items()}
    extra = dict[tuple[str, str], float]()
    for name, rows in options.items():
        for row in rows:
            if row.option in found[name]:
                added = found[name][row.option][binding[row.option]] - plain[name]
                extra[name, row.option] = added if CONVERT in row.words else max(added, 0.0)
    return Times(plain, extra)


def _binding(found: Mapping[str, Mapping[str, Seconds]], option: str) -> int:
    """Return which of a block's seconds count in a step whose blocks have an option where they can: 0 or 1."""
    host, device = map(sum, zip(*(seconds.get(option, seconds[""]) for seconds in found.values()), strict=True))
    return 0 if host > device else 1


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
        first = next(
            (place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
        )
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


def _rounds(
    model: nn.Module, call: _TimedCall, options: Sequence[PlannedBlock], make: Make, rounds: int, more: int
) -> dict[str, Seconds]:
    """Map options to seconds; "" to those of the block as it is."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    found: dict[str, list[Seconds]] = {"": [], **{option.option: [] for option in options}}
    _once(call, device)  # what is made once
    repeats = max(1, min(REPEATS, int(LONG / max(_once(call, device), 1e-6))))

    def timed() -> Seconds:
        single = _once(call, device)  # what a conversion makes in its first call
        if device.type == "cuda":
            return _queued(call, device, repeats, hold=single * repeats)
        seconds = min(_once(call, device) for _ in range(repeats))
        return Seconds(seconds, seconds)

    for done in range(rounds + more):
        if done >= rounds and all(_agree(seconds, found[""]) for seconds in found.values()):
            break
        found[""].append(timed())
        for option in options:
            with make(option).applied():
                found[option.option].append(timed())
    base = [statistics.median(each) for each in zip(*found[""], strict=True)]
    return {
        name: Seconds(
            *(one * statistics.median(each) for one, each in zip(base, _ratios(seconds, found[""]), strict=True))
        )
        for name, seconds in found.items()
    }


def _once(call: _TimedCall, device: torch.device) -> float:
    """Return the seconds of one call, for whose end the host waits."""
    _synchronize(device)
    begin = time.perf_counter()
    call.run()
    _synchronize(device)
    return time.perf_counter() - begin


def _queued(call: _TimedCall, device: torch.device, repeats: int, hold: float) -> Seconds:
    """Return the seconds of a call in a queue of several on CUDA.

    The host does not wait between them. While it issues those that the device is timed with, the device is busy for
    ``hold`` seconds, so that it does not wait for the host.
    """
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call.run()
    host = time.perf_counter() - begin
    _synchronize(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(int(hold * _CYCLES))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(repeats):
            call.run()
        last.record()
    _synchronize(device)
    return Seconds(host / repeats, first.elapsed_time(last) / 1000 / repeats)


def _ratios(seconds: Sequence[Seconds], plain: Sequence[Seconds]) -> list[list[float]]:
    """Return the rounds' ratios of host times, and of device times."""
    pairs = list(zip(seconds, plain, strict=True))
    return [[one[place] / max(exact[place], 1e-9) for one, exact in pairs] for place in range(2)]


def _agree(seconds: Sequence[Seconds], plain: Sequence[Seconds]) -> bool:
    """Say whether the rounds agree on an option: nothing else took the machine's time in some of them."""
    return all(max(each) - min(each) <= _SPREAD * statistics.median(each) for each in _ratios(seconds, plain))


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

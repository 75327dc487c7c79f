"""Measure an optimizer's memory: its state, and the temporaries of its step.

Both are found by a dry run: two steps of a twin, an optimizer of the same class with the same hyperparameters on dummy
parameters. These are tensors without data if the optimizer's step can do with them, first on
the meta device, where small tensors that an optimizer puts on the CPU keep their values, then as fake tensors, which
have the device of the parameters. Where the step needs values, it runs on real tensors, one for each shape, dtype and
group of parameters, and what it takes is multiplied.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from rmm_linear.fitting.shards import local, local_bytes, size_bytes
from rmm_linear.memory.peak import LiveTensors, Peak, storages
from rmm_linear.planning.replay.replayed import forked
from rmm_linear.planning.step.shards import Shards

_logger = logging.getLogger(__name__)

_FOREACH = ("cuda", "xpu", "mtia", "meta")  # devices where PyTorch's optimizers take all tensors at once by default


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes that an optimizer needs: its state after a step, and the peak of a step in addition to that."""

    state: int = 0
    transient: int = 0


@dataclass(frozen=True)
class _Member:
    """A parameter that the optimizer updates: its group, its shape on this rank, and whether it has state."""

    parameter: Tensor
    group: int
    shape: torch.Size
    has_state: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.shape, self.parameter.dtype, self.group


def optimizer_memory(
    optimizer: Any, parameters: Sequence[Tensor], device: torch.device, shards: Shards | None = None
) -> OptimizerMemory:
    """Return what an optimizer needs on one device.

    State that an instance has is counted as it is; a dry run finds the rest. The user's optimizer, the parameters and
    random numbers stay as they are. If an instance has state and cannot make a dry step, the transient is a guess,
    which is logged: the size of the parameters that PyTorch's optimizers take at once.

    A dry run costs two steps: nothing on tensors without data, and for optimizers that need values one parameter,
    gradient and state for each shape.

    On an accelerator, state on the CPU, such as the number of the step, is not counted. On the meta device, an
    optimizer that leaves the choice to PyTorch takes all tensors at once, as it will on an accelerator.
    """
    optimizer = _unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise TypeError(
            "optimizer must be an instance of torch.optim.Optimizer, a class, or a callable that takes parameters and "
            f"returns an optimizer, got {optimizer!r}. Use functools.partial(SGD, momentum=0.9) for hyperparameters."
        )
    accelerated = device.type not in ("cpu", "meta")
    members = _members(optimizer, parameters, shards, accelerated)
    if not members:
        return OptimizerMemory()
    present = 0
    if isinstance(optimizer, Optimizer) and shards is None:
        present = sum(_state_sizes(optimizer.state.values(), accelerated).values())
    failures: list[str] = []
    for dry_run in (_on_meta, _on_fakes, _on_real):
        try:
            with unset_fake_temporarily(), forked([device] if _is_real(device) and device.type != "cpu" else []):
                found = dry_run(optimizer, members, device)
        except Exception as error:  # whatever an optimizer raises that cannot do without values
            failures.append(f"{type(error).__name__}: {error}".rstrip("."))
        else:
            return OptimizerMemory(present + found.state, found.transient)
    if any(member.has_state for member in members):
        sizes = [size_bytes(member.shape, member.parameter.dtype) for member in members]
        guess = sum(sizes) if device.type in _FOREACH else max(sizes)
        _logger.warning(
            "%s cannot make a dry step (%s): its step is taken to make temporaries of %d bytes, the size of the "
            "parameters that PyTorch's optimizers take at once.",
            _name(optimizer),
            failures[-1],
            guess,
        )
        return OptimizerMemory(present, guess)
    raise ValueError(
        f"the state of an optimizer must be known or found by a dry step, and that of {_name(optimizer)} raised "
        f"{failures[-1]}. Make one real step first, then pass the instance."
    )


def state_on(tensor: Tensor, accelerated: bool) -> bool:
    """Say whether a tensor is on the device that is counted: not on the CPU, if the model is on an accelerator."""
    return not accelerated or tensor.device.type != "cpu"


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer in a wrapper, such as that of Accelerate."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _name(optimizer: Any) -> str:
    made = getattr(optimizer, "func", optimizer)  # of functools.partial
    return getattr(made, "__qualname__", type(made).__qualname__)


def _is_real(device: torch.device) -> bool:
    """Say whether tensors can be made there; a model of fake tensors may name a device that is not there."""
    return device.type == "cpu" or (device.type != "meta" and torch.get_device_module(device).is_available())


def _members(optimizer: Any, parameters: Sequence[Tensor], shards: Shards | None, accelerated: bool) -> list[_Member]:
    instance = isinstance(optimizer, Optimizer)
    groups = [group["params"] for group in optimizer.param_groups] if instance else [parameters]
    found: list[_Member] = []
    for index, group in enumerate(groups):
        for parameter in group:
            if parameter.requires_grad and state_on(parameter, accelerated):
                shape = local(parameter.detach()).shape
                has_state = instance and shards is None and bool(optimizer.state.get(parameter))
                found.append(_Member(parameter, index, shards.shape(shape) if shards else shape, has_state))
    return found


def _state_sizes(values: Iterable[Any], accelerated: bool) -> dict[int, int]:
    """Return the bytes of the storages of tensors in a state, by storage."""
    leaves = [local(leaf) for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)]
    kept = [leaf for leaf in leaves if state_on(leaf, accelerated)]
    return {storage._cdata: storage.nbytes() for storage in storages(kept)}


def _on_meta(optimizer: Any, members: Sequence[_Member], device: torch.device) -> OptimizerMemory:
    return _dry_run(optimizer, members, torch.device("meta"), device)


def _on_fakes(optimizer: Any, members: Sequence[_Member], device: torch.device) -> OptimizerMemory:
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = device if device.type != "meta" else torch.device("cpu")
        return _dry_run(optimizer, members, made, device)


def _on_real(optimizer: Any, members: Sequence[_Member], device: torch.device) -> OptimizerMemory:
    made = device if _is_real(device) else torch.device("cpu")
    return _dry_run(optimizer, members, made, device, one_per_kind=True)


def _dry_run(
    optimizer: Any, members: Sequence[_Member], made: torch.device, device: torch.device, one_per_kind: bool = False
) -> OptimizerMemory:
    """Make two steps on dummy parameters: the first makes the state, the second has it."""
    kinds: dict[Any, nn.Parameter] = {}
    dummies: dict[int, nn.Parameter] = {}  # by the identity of the parameter
    times: Counter[int] = Counter()  # how many parameters without state a dummy represents
    for member in members:
        key = member.kind if one_per_kind else id(member.parameter)
        dummy = kinds.get(key)
        if dummy is None:
            dummy = kinds[key] = _dummy(member, made)
        dummies[id(member.parameter)] = dummy
        times[id(dummy)] += not member.has_state
    if isinstance(optimizer, Optimizer):
        twin = _twin(optimizer, dummies)
    else:
        twin = _unwrapped(optimizer(list(kinds.values())))
        if not isinstance(twin, Optimizer):
            raise TypeError(f"the callable returned {twin!r}, not an optimizer")
    _choose_foreach(twin, device)
    result = Peak()
    with LiveTensors(result, counts_meta=made.type == "meta") as live:
        for _ in range(2):
            type(twin).step(twin)  # the step of an instance may be patched, by a scheduler, to step the user's
    transient = result.bytes - live.now
    if any(group.get("foreach") for group in twin.param_groups):  # of all parameters, not of one at a time
        whole = sum(size_bytes(member.shape, member.parameter.dtype) for member in members)
        transient = transient * whole // local_bytes(kinds.values())
    return OptimizerMemory(_multiplied(twin, times, device), transient)


def _dummy(member: _Member, device: torch.device) -> nn.Parameter:
    dummy = nn.Parameter(torch.ones(member.shape, dtype=member.parameter.dtype, device=device))
    dummy.grad = torch.ones_like(dummy)
    return dummy


def _twin(optimizer: Optimizer, dummies: dict[int, nn.Parameter]) -> Optimizer:
    """Return an optimizer like another, on other parameters, without its state and its hooks."""

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return dummies[id(leaf)] if id(leaf) in dummies else leaf.detach().clone()

    kind = type(optimizer)
    twin = kind.__new__(kind)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = OrderedDict()
        elif name not in ("state", "param_groups"):
            twin.__dict__[name] = tree_map(replaced, value)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        own = {id(dummies[id(p)]): dummies[id(p)] for p in group["params"] if id(p) in dummies}
        rest = {name: tree_map(replaced, value) for name, value in group.items() if name != "params"}
        twin.param_groups.append({"params": list(own.values()), **rest})
    return twin


def _choose_foreach(twin: Optimizer, device: torch.device) -> None:
    """Choose as PyTorch does on the device of the parameters; for tensors without data it would choose a loop."""
    for group in twin.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            values = isinstance(group.get("lr"), Tensor) and not group.get("capturable")
            looped = values or group.get("differentiable") or isinstance(twin, torch.optim.Adafactor)
            group["foreach"] = device.type in _FOREACH and not looped


def _multiplied(twin: Optimizer, times: Counter[int], device: torch.device) -> int:
    """Return the bytes of a state, each storage as often as there are parameters that need one of their own."""
    accelerated = device.type not in ("cpu", "meta")
    sizes: dict[int, int] = {}
    owners: dict[int, list[int]] = defaultdict(list)
    for key, value in twin.state.items():
        for storage, size in _state_sizes([value], accelerated).items():
            sizes[storage] = size
            owners[storage].append(times.get(id(key), 1))
    return sum(size * (owners[key][0] if len(owners[key]) == 1 else any(owners[key])) for key, size in sizes.items())

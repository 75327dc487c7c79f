"""Count the memory that a training run needs in addition to its activations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from rmm_linear._support.distributed import is_dtensor
from rmm_linear.fitting.optimizer_state import OptimizerMemory, optimizer_memory, state_on
from rmm_linear.fitting.shards import gathered_bytes, local, local_bytes
from rmm_linear.memory.peak import parts, storages
from rmm_linear.memory.quantized import as_held, states
from rmm_linear.planning.blocks.stages import parameters_of_stage
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.tensor_parallel import tensor_parallel_sizes


@dataclass(frozen=True)
class StaticMemory:
    """Memory of a training run in addition to its activations, in bytes per device and rank."""

    # Of the model; weights that are tied, and views of one memory, count once. Quantized ones are packed.
    parameters: int = 0
    # Of the model, and scales and codes that quantized weights keep outside of parameters and buffers; counted in the
    # same way, without what parameters have
    buffers: int = 0
    gradients: int = 0  # of all parameters that require a gradient
    optimizer: int = 0  # state of the optimizer, once it has made a step
    optimizer_transient: int = 0  # peak of the temporaries of the optimizer's step
    ddp_buckets: int = 0  # copies of the gradients that DistributedDataParallel communicates
    gathered: int = 0  # peak of what fully_shard holds unsharded, in addition to the rank's own parts
    host: int = 0  # parameters, gradients and the optimizer's state that are in the host's memory instead

    @property
    def before_step(self) -> int:
        """Bytes that are there before a step and do not belong to it: all but gradients and the transient."""
        return self.parameters + self.buffers + self.optimizer + self.ddp_buckets + self.gathered

    @property
    def in_optimizer_step(self) -> int:
        """Peak in bytes of the optimizer's step, when nothing is gathered any more."""
        return self.before_step - self.gathered + self.gradients + self.optimizer_transient

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by name, as JSON can hold them."""
        return asdict(self)


def static_memory(model: nn.Module, optimizer: Any = None, shards: Shards | None = None) -> StaticMemory:
    """Count what a training run needs in addition to its activations.

    Nothing runs but a dry step of the optimizer, on parameters without data; the model, the optimizer and random
    numbers stay as they are. The model may lie on a device, on the meta device, or consist of fake tensors.

    A budget is one device's. If the model is on an accelerator, what lies on the CPU is not counted; what lies on
    several accelerators is counted together. Quantized weights count as they are packed, with their scales: also those
    of bitsandbytes on the meta device, which it quantizes on the way to another one, and tensor subclasses that consist
    of other tensors, such as torchao's. Other packages' count if they keep tensors in attributes of their layers.

    A model in ``DistributedDataParallel`` needs buckets. Of one that is divided already (``DTensor`` parameters), the
    local parts count, and what ``fully_shard`` gathers.
    """
    with tensor_parallel_sizes(model, shards):
        return static_memory_of(model, optimizer, shards)


def static_memory_of(model: nn.Module, optimizer: Any, shards: Shards | None) -> StaticMemory:
    """Do it for a model that has the sizes of tensor parallelism already."""
    everything = [*model.parameters(), *model.buffers()]
    _check(model, everything, shards)
    accelerated = any(_device_type(tensor) not in ("cpu", "meta") for tensor in everything)
    counted = [parameter for _, parameter in parameters_of_stage(model, shards) if state_on(parameter, accelerated)]
    trained = [parameter for parameter in counted if parameter.requires_grad]
    weights = [as_held(parameter) for parameter in counted]
    parameters = [part for weight, _ in weights for part in parts(local(weight.detach()))]
    kept = [*model.buffers(), *states(model), *(tensor for _, state in weights for tensor in state)]
    buffers = [buffer for buffer in kept if state_on(buffer, accelerated)]
    held = _storages(parameters)
    gradients = local_bytes(trained, shards)
    buckets = isinstance(model, nn.parallel.DistributedDataParallel) and not model.gradient_as_bucket_view
    stays = shards is None or not shards.cpu_offload
    needed = OptimizerMemory()
    if optimizer is not None and trained:
        device = next((p.device for p in trained if p.device.type != "cpu"), trained[0].device)
        needed = optimizer_memory(optimizer, trained, device, shards)
    whole = local_bytes(parameters, shards) if shards else sum(held.values())
    return StaticMemory(
        parameters=stays * whole,
        buffers=sum((_storages(buffers) | held).values()) - sum(held.values()),
        gradients=stays * gradients,
        optimizer=stays * needed.state,
        optimizer_transient=stays * needed.transient,
        ddp_buckets=gradients if buckets else 0,
        gathered=gathered_bytes(model, shards),
        host=(not stays) * (whole + gradients + needed.state),
    )


def _check(model: nn.Module, tensors: Iterable[Tensor], shards: Shards | None) -> None:
    if shards is None:
        return
    if any(is_dtensor(tensor) for tensor in tensors):
        raise ValueError(
            f"shards describe a model that is not divided yet, got {shards} for a model with DTensor parameters. Leave "
            "shards out: the local parts are counted."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"shards describe a model that is not wrapped, got {shards} for DistributedDataParallel. Pass the model "
            "inside of it (model.module)."
        )


def _device_type(tensor: Tensor) -> str:
    """Return the device it is computed on; parts of a ``DTensor`` may lie on the CPU meanwhile."""
    return tensor.device_mesh.device_type if is_dtensor(tensor) else tensor.device.type  # pyright: ignore[reportAttributeAccessIssue]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, by storage."""
    found = storages([local(tensor.detach()) for tensor in tensors])
    return {storage._cdata: storage.nbytes() for storage in found}

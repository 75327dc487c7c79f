"""Simulate one stage of a pipeline, by the blocks of a whole step.

Stages have equal numbers of the repeated blocks; what comes before these is the first stage's, what comes after them
the last one's, as with PyTorch's ``torch.distributed.pipelining``. A stage holds what its blocks save for each
micro-batch in flight, their outputs too, and buffers to receive in, which PyTorch makes for all micro-batches at once:
inputs, but in the first stage, and gradients of outputs, but in the last. At the peak the gradients of its weights are
there, and the backward pass of one micro-batch runs. The model's own outputs are held until then, and no longer, as
with ``schedule.step(..., return_outputs=False)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rmm_linear.memory.peak import GRADIENTS, SAVED, LiveTensor, Peak
from rmm_linear.planning.blocks.find import find_blocks, owner_of, repeated_blocks
from rmm_linear.planning.blocks.measure import by_pass
from rmm_linear.planning.blocks.observe import observe
from rmm_linear.planning.step.follow import BACKWARD, FORWARD
from rmm_linear.planning.step.shards import Shards
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import Workspace


def parameters_of_stage(model: nn.Module, shards: Shards | None) -> Iterator[tuple[str, nn.Parameter]]:
    if shards is None or shards.stages == 1:
        yield from model.named_parameters()
        return
    blocks = find_blocks(model)
    stages = _stages(model, blocks, shards)
    for name, parameter in model.named_parameters():
        if stages.get(owner_of(name, blocks) or "", 0) == shards.stage:
            yield name, parameter


def simulate_stage(model: nn.Module, example: Any, shards: Shards, workspace: Workspace | None = None) -> Peak:
    blocks = [*observe(model, example, find_blocks(model))[0]]
    stages = _stages(model, blocks, shards)
    mine = [name for name in blocks if stages[name] == shards.stage or _is_everywhere(model, name)]
    sizes, handles = dict[int, int](), list[Any]()

    def note(stage: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            sizes[stage] = found.numel() * found.itemsize

        return hook

    for stage in range(shards.stages):
        last = [name for name in blocks if stages[name] == stage][-1]
        handles.append(model.get_submodule(last).register_forward_hook(note(stage)))
    try:
        events = watch(model, example, workspace, held=lambda parameter: 0)[1].events
    finally:
        for handle in handles:
            handle.remove()
    kept, *passes = by_pass(events, blocks)
    gradients = sum(shards.gradient_bytes(one) for _, one in parameters_of_stage(model, shards) if one.requires_grad)
    return _peak(mine, kept, passes, sizes, shards, gradients)


def _peak(
    blocks: Sequence[str],
    kept: Mapping[str, int],
    passes: Sequence[Mapping[str, int]],
    sizes: Mapping[int, int],
    shards: Shards,
    gradients: int,
) -> Peak:
    """Add up a stage; ``sizes`` are the bytes of what leaves each stage, the model's output among them."""
    count, output, is_last = (
        shards.microbatches or shards.stages,
        sizes[shards.stage],
        shards.stage == shards.stages - 1,
    )
    always = gradients + count * (sizes.get(shards.stage - 1, 0) + (0 if is_last else output))
    # The next block saves a block's output; the model's own is held for the backward pass.
    others = (shards.in_flight - 1) * (sum(kept[name] for name in blocks) + (output if is_last else 0))
    found, before = Peak(measure="simulated live tensors"), 0
    for name in blocks:
        for pass_, highest in zip((FORWARD, BACKWARD), passes, strict=True):
            now = always + others + before + highest[name]
            if pass_ == BACKWARD:  # the output is held until it ends; its gradient lies in a buffer already
                now += output if is_last or name != blocks[-1] else 0
            if now > found.bytes:
                found.bytes, found.moment = now, f"{pass_} of {name} on stage {shards.stage} of {shards.stages}"
        before += kept[name]
    saved = [LiveTensor(shards.in_flight * kept[name], name, kind=SAVED) for name in blocks if kept[name]]
    rest = found.bytes - gradients - sum(one.bytes for one in saved)
    found.alive = [*saved, LiveTensor(gradients, kind=GRADIENTS), LiveTensor(rest)]
    return found


def _stages(model: nn.Module, blocks: Sequence[str], shards: Shards) -> dict[str, int]:
    repeated = [name for name in repeated_blocks(model) if name in blocks]
    if len(repeated) < shards.stages:
        raise ValueError(
            f"stages must be at most the model's {len(repeated)} repeated blocks, got {shards.stages}. Use fewer."
        )
    of = {name: place * shards.stages // len(repeated) for place, name in enumerate(repeated)}
    found, left, last = dict[str, int](), len(of), 0
    for name in blocks:
        left -= name in of
        last = found[name] = of.get(name, last if left else shards.stages - 1)
    return found


def _is_everywhere(model: nn.Module, name: str) -> bool:
    """Say whether every stage computes what a block does, such as rotary embeddings: it has no weights."""
    return next(model.get_submodule(name).parameters(), None) is None

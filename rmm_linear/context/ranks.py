"""The ranks of a tensor parallel group draw alike what they compute alike.

They are one copy of the model. Modules that hold a part of a weight compute what no other rank does, and draw numbers
of their own. All others, as norms and routers, compute the same on every rank, and their parameters are there on every
rank: other numbers would give them other gradients, and the copies would drift apart without a word. So their seeds
follow from the group's first rank, and from the generator's state, which must be the same on all ranks, as dropout
needs it to be as well. That is compared in the forward passes 1, 2, 4, 8, … of the training. Of a mesh that has
replicas with batches of their own besides, the group is what divides weights: replicas draw other numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rmm_linear._support.distributed import is_dtensor, tensor_parallel
from rmm_linear.sketches.seeds import is_simulated, mix, peek_seed

_APART = (
    "The ranks of a tensor parallel group must draw the same random numbers, but their CPU generators are in different "
    "states: gradients of what every rank has as a whole, as norms, would differ from rank to rank. Call "
    "torch.manual_seed with the same seed on all ranks of a group, and draw as many numbers on each of them."
)


class Ranks:
    """What a model's ranks have in common.

    Attributes:
        divided: Indices of the modules that hold a part of a weight, or get a part of the group's rows.
        leader: The first rank of this rank's group.
    """

    def __init__(self) -> None:
        """Begin with a model that is not parallel."""
        self.divided: set[int] = set()
        self.leader, self._own, self._passes, self._is_listed = 0, 0, 0, False
        self._groups: list[Any] = []
        self._device = "cpu"

    @property
    def are_several(self) -> bool:
        """Say whether the model is tensor parallel, as far as is known."""
        return bool(self._groups)

    def look(self, model: nn.Module) -> None:
        """Find out whether a model is tensor parallel; it may become so at any time after its conversion."""
        if not self._groups and (found := tensor_parallel(model)) is not None:
            self.join(*found)

    def open(self, model: nn.Module) -> Ranks | None:
        """Begin a forward pass of a model; None if it is not tensor parallel."""
        self.look(model)
        if not self._groups:
            return None
        if not self._is_listed:
            self._is_listed = True
            for module in model.modules():
                if "rmm_index" in vars(module):
                    for one in filter(is_dtensor, module.parameters()):
                        self.note(vars(module)["rmm_index"], one.device_mesh, one.placements)  # pyright: ignore
        if model.training and torch.is_grad_enabled() and not is_simulated():
            self._passes += 1
            if self._passes & (self._passes - 1) == 0:
                self._compare()
        return self

    def join(self, mesh: Any, dims: set[int]) -> None:
        """Take the ranks of this rank's group, in some dimensions of a mesh, if there is none yet."""
        several = [dim for dim in sorted(dims) if mesh.size(dim) > 1]
        if not self._groups and several:
            own = mesh.get_coordinate()
            self.leader = int(mesh.mesh[tuple(0 if dim in several else at for dim, at in enumerate(own))])
            self._own = mix(*(own[dim] for dim in several))
            self._groups, self._device = [mesh.get_group(dim) for dim in several], mesh.device_type

    def note(self, index: int, mesh: Any, *placements: Any) -> None:
        """Note that a module's tensors lie so on a mesh: it draws numbers of its own where they divide the group."""
        if index in self.divided:
            return
        for dim, places in enumerate(zip(*placements, strict=True)):
            if not all(one.is_replicate() for one in places) and mesh.get_group(dim) in self._groups:
                self.divided.add(index)

    def own_part(self, index: int) -> int:
        """Return what sets the seeds of a module apart from those of the other ranks; 0 for nothing."""
        return self._own if index in self.divided else 0

    def _compare(self) -> None:
        state = peek_seed(0)
        mine = torch.tensor([state], device=self._device)
        for group in self._groups:
            found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(found, mine, group=group)
            if any(int(one) != state for one in found):
                raise RuntimeError(_APART)

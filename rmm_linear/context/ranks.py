"""The ranks of a tensor parallel group draw alike what they compute alike.

They are one copy of the model. Modules that hold a part of a weight compute what no other rank does, and draw numbers
of their own. All others, as norms and routers, compute the same on every rank, and their parameters are there on every
rank: other numbers would give them other gradients, and the copies would drift apart without a word. So their seeds
follow from the group's first rank, and from the generator's state, which must be the same on all ranks, as dropout
needs it to be as well. That is compared in the forward passes 1, 2, 4, 8, … of the training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rmm_linear._support.distributed import is_dtensor, tensor_parallel_mesh
from rmm_linear.sketches.seeds import is_simulated, mix, peek_seed

_LOOKS = 3  # forward passes in which a model is looked at: it may be made parallel after its conversion
_APART = (
    "The ranks of a tensor parallel group must draw the same random numbers, but their CPU generators are in different "
    "states: gradients of what every rank has as a whole, as norms, would differ from rank to rank. Call "
    "torch.manual_seed with the same seed on all ranks of a group, and draw as many numbers on each of them."
)


class Ranks:
    """What a model's ranks have in common.

    Attributes:
        divided: Indices of the modules that hold a part of a weight, or get a part of the rows.
        leader: The first rank of this rank's group.
    """

    def __init__(self) -> None:
        """Begin with a model that is not parallel."""
        self.divided: set[int] = set()
        self.leader, self._own, self._looks, self._passes, self._is_listed = 0, 0, 0, 0, False
        self._mesh: Any = None

    @property
    def are_several(self) -> bool:
        """Say whether the model is tensor parallel, as far as is known."""
        return self._mesh is not None

    def look(self, model: nn.Module) -> None:
        """Find out whether a model is tensor parallel."""
        if self._mesh is None and self._looks < _LOOKS:
            self._looks += 1
            self.join(tensor_parallel_mesh(model))

    def open(self, model: nn.Module) -> Ranks | None:
        """Begin a forward pass of a model; None if it is not tensor parallel."""
        self.look(model)
        if self._mesh is None:
            return None
        if not self._is_listed:
            self._is_listed = True
            converted = [one for one in model.modules() if "rmm_index" in vars(one)]
            self.divided |= {vars(one)["rmm_index"] for one in converted if any(map(_is_part, one.parameters()))}
        if model.training and torch.is_grad_enabled() and not is_simulated():
            self._passes += 1
            if self._passes & (self._passes - 1) == 0:
                self._compare()
        return self

    def join(self, mesh: Any) -> None:
        """Take a mesh of ranks for the group, if there is none yet."""
        if self._mesh is None and mesh is not None and mesh.size() > 1:
            self._mesh, self.leader = mesh, int(mesh.mesh.flatten()[0])
            self._own = mix(*mesh.get_coordinate())

    def own_part(self, index: int) -> int:
        """Return what sets the seeds of a module apart from those of the other ranks; 0 for nothing."""
        return self._own if index in self.divided else 0

    def _compare(self) -> None:
        state = peek_seed(0)
        mine = torch.tensor([state], device=self._mesh.device_type)
        for dim in range(self._mesh.ndim):
            group = self._mesh.get_group(dim)
            found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather(found, mine, group=group)
            if any(int(one) != state for one in found):
                raise RuntimeError(_APART)


def _is_part(tensor: Tensor) -> bool:
    return is_dtensor(tensor) and not tensor.placements[-1].is_replicate()  # pyright: ignore[reportAttributeAccessIssue]

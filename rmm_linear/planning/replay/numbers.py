"""Draw random numbers again: PyTorch's on all devices, Python's and NumPy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rmm_linear._support.generators import States, are_equal, other_generators, set_other_generators
from rmm_linear.planning.replay.replayed import forked, generator_states, set_generator_states


class DrawnNumbers:
    """The random numbers that one run draws, for those that repeat it."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Look at the generators before the run; of a device that nothing has used there are only fake tensors."""
        self._devices = [one for one in devices if getattr(torch.get_device_module(one), "_initialized", True)]
        self._states: list[Tensor] = generator_states(self._devices)
        self._others: States | None = other_generators()

    def settle(self) -> None:
        """Forget, after the run, the states of generators that it has not used."""
        if self._others is not None and are_equal(self._others, other_generators()):
            self._others = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw them again inside the block, and leave the generators as they are now."""
        before = None if self._others is None else other_generators()
        with forked(self._devices):
            set_generator_states(self._states, self._devices)
            if self._others is not None:
                set_other_generators(self._others)
            try:
                yield
            finally:
                if before is not None:
                    set_other_generators(before)

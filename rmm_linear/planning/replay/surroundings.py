"""What a step sees beside its arguments, as it was in the forward pass: autocast and the global random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rmm_linear.planning.replay.generators import accelerators, forked, generator_states, set_generator_states


@dataclass(frozen=True)
class Surroundings:
    """Autocast as it was, and the devices that have a generator.

    Attributes:
        devices: Devices other than the CPU.
        autocast: For every type of device: the type, whether autocast was on, and its dtype.
    """

    devices: list[torch.device]
    autocast: list[tuple[str, bool, torch.dtype]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Surroundings:
        """Look around.

        Args:
            tensors: Tensors on all devices that matter.

        Returns:
            What is there now.
        """
        devices = accelerators(tensors)
        kinds = ["cpu", *sorted({device.type for device in devices})]
        return cls(devices, [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Set autocast as it was.

        Its cache is off: a cast that was made without a graph must not be taken for one with a graph, by the step's
        next run or by the caller.
        """
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield

    def generators(self) -> list[Tensor]:
        """Return the states of all generators."""
        return generator_states(self.devices)

    def set_generators(self, states: Sequence[Tensor]) -> None:
        """Set what :meth:`generators` returned."""
        set_generator_states(states, self.devices)

    def generators_kept(self) -> contextlib.AbstractContextManager[None]:
        """Leave the generators as they were."""
        return forked(self.devices)

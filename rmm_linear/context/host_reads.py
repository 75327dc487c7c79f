"""Read numbers from a device without waiting for what it was asked to do later."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def waits(device: torch.device) -> bool:
    """Say whether the host waits where it reads a number from a device."""
    return device.type != "cpu"


class HostRead:
    """A few integers on their way to the host, from the moment that this is made."""

    def __init__(self, values: Tensor) -> None:
        """Begin to copy ``values``, of one dimension."""
        self._values, self._event = values, None
        if values.is_cuda:
            place = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            self._values, self._event = place.copy_(values, non_blocking=True), torch.cuda.Event()
            self._event.record()

    @functools.cached_property
    def values(self) -> list[int]:
        """The integers; the first use waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()

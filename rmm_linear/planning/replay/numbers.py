"""Draw random numbers again: PyTorch's on all devices, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rmm_linear.planning.replay.replayed import forked, generator_states, set_generator_states


class DrawnNumbers:
    """The random numbers that one run draws, for those that repeat it."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Look at the generators before the run; of a device that nothing has used there are only fake tensors."""
        self._devices = [one for one in devices if getattr(torch.get_device_module(one), "_initialized", True)]
        self._states: list[Tensor] = generator_states(self._devices)
        self._others: Any = _others()

    def settle(self) -> None:
        """Forget, after the run, the states of generators that it has not used."""
        if _plain(self._others) == _plain(_others()):
            self._others = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw them again inside the block, and leave the generators as they are now."""
        before = None if self._others is None else _others()
        with forked(self._devices):
            set_generator_states(self._states, self._devices)
            _set(self._others)
            try:
                yield
            finally:
                _set(before)


def _others() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _set(states: Any) -> None:
    if states is not None:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])


def _plain(states: Any) -> Any:
    """Return states that can be compared."""
    return states[0], None if states[1] is None else (states[1][1].tobytes(), *states[1][2:])

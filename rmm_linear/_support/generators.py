"""The states of the global random generators of Python and NumPy, which PyTorch's do not include."""

from __future__ import annotations

import random
import sys
from typing import Any

States = tuple[Any, Any]


def other_generators() -> States:
    """Return the states; NumPy's is None where nothing has imported it."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_other_generators(states: States) -> None:
    """Set what :func:`other_generators` returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def are_equal(states: States, others: States) -> bool:
    """Compare states, whose arrays cannot be."""
    plain = [(own, None if of is None else (of[1].tobytes(), *of[2:])) for own, of in (states, others)]
    return plain[0] == plain[1]

"""Where memory goes: bytes kept for the backward pass per module, peak memory, what a conversion would change."""

from rmm_linear.memory.explain import Explanation, LayerMemory, explain
from rmm_linear.memory.ledger import Ledger, track_saved
from rmm_linear.memory.peak import Peak, peak

__all__ = ["Explanation", "LayerMemory", "Ledger", "Peak", "explain", "peak", "track_saved"]

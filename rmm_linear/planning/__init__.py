"""Plans for training within a memory budget: what is recomputed in the backward pass, and the peak, predicted."""

from rmm_linear.planning.simulate import simulate

__all__ = ["simulate"]

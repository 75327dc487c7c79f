"""Long chains of steps in little memory: differentiable sweeps that store some states and compute the others again."""

from rmm_linear.planning.store import StoreError, open_store
from rmm_linear.planning.sweep import sweep
from rmm_linear.planning.sweep_report import SweepReport

__all__ = ["StoreError", "SweepReport", "open_store", "sweep"]

"""Long chains of steps in little memory: some states are kept, the others are computed again."""

from rmm_linear.planning.bptt_function import bptt, step_bytes
from rmm_linear.planning.bptt_plans import BPTTPlan, StepBytes, plan_bptt
from rmm_linear.planning.chain_runs import chain_sizes, checkpoint_chain
from rmm_linear.planning.chains import ChainPlan, minimum_peak
from rmm_linear.planning.store import StoreError, open_store
from rmm_linear.planning.sweep import sweep
from rmm_linear.planning.sweep_report import SweepReport

__all__ = [
    "BPTTPlan",
    "ChainPlan",
    "StepBytes",
    "StoreError",
    "SweepReport",
    "bptt",
    "chain_sizes",
    "checkpoint_chain",
    "minimum_peak",
    "open_store",
    "plan_bptt",
    "step_bytes",
    "sweep",
]

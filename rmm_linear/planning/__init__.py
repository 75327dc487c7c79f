"""Training within a memory budget: what is kept, what is computed again, and the peak, predicted."""

from rmm_linear.planning.backend import Backend, backend
from rmm_linear.planning.block_plan import BlockPlan, PlannedBlock
from rmm_linear.planning.bptt_function import bptt, step_bytes
from rmm_linear.planning.bptt_plans import BPTTPlan, StepBytes, plan_bptt
from rmm_linear.planning.capture import CaptureError
from rmm_linear.planning.chain_runs import chain_sizes, checkpoint_chain
from rmm_linear.planning.chains import ChainPlan, minimum_peak
from rmm_linear.planning.graph_plan import GraphPlan, PlannedPiece
from rmm_linear.planning.load import load_plan
from rmm_linear.planning.measure import BlockCost, Costs, measure
from rmm_linear.planning.memory_plots import plot_memory
from rmm_linear.planning.node_costs import NodeCost
from rmm_linear.planning.order import order
from rmm_linear.planning.plan_blocks import plan_blocks
from rmm_linear.planning.plan_graph import plan_graph
from rmm_linear.planning.simulate import simulate
from rmm_linear.planning.store import StoreError, open_store
from rmm_linear.planning.sweep import sweep
from rmm_linear.planning.sweep_report import SweepReport
from rmm_linear.planning.workspace import workspace

__all__ = [
    "BPTTPlan",
    "Backend",
    "BlockCost",
    "BlockPlan",
    "CaptureError",
    "ChainPlan",
    "Costs",
    "GraphPlan",
    "NodeCost",
    "PlannedBlock",
    "PlannedPiece",
    "StepBytes",
    "StoreError",
    "SweepReport",
    "backend",
    "bptt",
    "chain_sizes",
    "checkpoint_chain",
    "load_plan",
    "measure",
    "minimum_peak",
    "open_store",
    "order",
    "plan_blocks",
    "plan_bptt",
    "plan_graph",
    "plot_memory",
    "simulate",
    "step_bytes",
    "sweep",
    "workspace",
]

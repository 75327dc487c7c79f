"""Plans for training within a memory budget: what is recomputed in the backward pass, and the peak, predicted."""

from rmm_linear.planning.backend import Backend, backend
from rmm_linear.planning.block_plan import BlockPlan, PlannedBlock
from rmm_linear.planning.capture import CaptureError
from rmm_linear.planning.graph_plan import GraphPlan, PlannedPiece
from rmm_linear.planning.load import load_plan
from rmm_linear.planning.measure import BlockCost, Costs, measure
from rmm_linear.planning.plan_blocks import plan_blocks
from rmm_linear.planning.plan_graph import plan_graph
from rmm_linear.planning.simulate import simulate

__all__ = [
    "Backend",
    "BlockCost",
    "BlockPlan",
    "CaptureError",
    "Costs",
    "GraphPlan",
    "PlannedBlock",
    "PlannedPiece",
    "backend",
    "load_plan",
    "measure",
    "plan_blocks",
    "plan_graph",
    "simulate",
]

"""Plans for training within a memory budget: what is recomputed in the backward pass, and the peak, predicted."""

from rmm_linear.planning.block_plan import BlockPlan, PlannedBlock, load_plan
from rmm_linear.planning.measure import BlockCost, Costs, measure
from rmm_linear.planning.plan_blocks import plan_blocks
from rmm_linear.planning.simulate import simulate

__all__ = ["BlockCost", "BlockPlan", "Costs", "PlannedBlock", "load_plan", "measure", "plan_blocks", "simulate"]

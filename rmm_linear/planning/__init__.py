"""Plan training within a memory budget: choose what to save and what to recompute, and predict the peak."""

import importlib
from typing import TYPE_CHECKING, Any

import rmm_linear.planning.blocks.applied  # noqa: F401 registers the executor of BlockPlan
from rmm_linear.planning.blocks.measure import BlockCost, Costs, measure
from rmm_linear.planning.blocks.plan import BlockPlan, PlannedBlock
from rmm_linear.planning.blocks.plan_blocks import plan_blocks
from rmm_linear.planning.chains.bptt import bptt, step_bytes
from rmm_linear.planning.chains.bptt_plans import BPTTPlan, StepBytes, plan_bptt
from rmm_linear.planning.chains.modules import chain_sizes, checkpoint_chain
from rmm_linear.planning.chains.subsets import ChainPlan, minimum_peak
from rmm_linear.planning.chains.sweep import sweep
from rmm_linear.planning.chains.sweep_settings import SweepReport
from rmm_linear.planning.graphs.backend import Backend, backend
from rmm_linear.planning.graphs.capture import CaptureError
from rmm_linear.planning.graphs.knapsack import CompileBudget, KnapsackSolver, Partition, compile_budget
from rmm_linear.planning.graphs.node_costs import NodeCost
from rmm_linear.planning.graphs.order import order
from rmm_linear.planning.graphs.plan import GraphPlan, PlannedPiece
from rmm_linear.planning.graphs.plan_graph import plan_graph
from rmm_linear.planning.load import load_plan
from rmm_linear.planning.plans import Applied, apply
from rmm_linear.planning.simulation import simulate
from rmm_linear.planning.step.plots import plot_memory
from rmm_linear.planning.step.workspace import workspace
from rmm_linear.planning.stores.base import StoreError
from rmm_linear.planning.stores.open import open_store

if TYPE_CHECKING:
    from rmm_linear.fitting.oom import OutOfMemoryReport, explain_oom
    from rmm_linear.fitting.ways import Way

__all__ = [
    "Applied",
    "BPTTPlan",
    "Backend",
    "BlockCost",
    "BlockPlan",
    "CaptureError",
    "ChainPlan",
    "CompileBudget",
    "Costs",
    "GraphPlan",
    "KnapsackSolver",
    "NodeCost",
    "OutOfMemoryReport",
    "Partition",
    "PlannedBlock",
    "PlannedPiece",
    "StepBytes",
    "StoreError",
    "SweepReport",
    "Way",
    "apply",
    "backend",
    "bptt",
    "chain_sizes",
    "checkpoint_chain",
    "compile_budget",
    "explain_oom",
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

# Fitting imports this folder, so these are imported on first access.
_FROM_FITTING = {"OutOfMemoryReport": "oom", "Way": "ways", "explain_oom": "oom"}


def __getattr__(name: str) -> Any:
    if name not in _FROM_FITTING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"rmm_linear.fitting.{_FROM_FITTING[name]}"), name)

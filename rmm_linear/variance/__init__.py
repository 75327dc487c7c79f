"""Variance of the weight gradient: that of the sketch, and that of minibatch sampling to compare it with."""

from rmm_linear.variance.closed_forms import correlation, sgd_variance, sketch_variance
from rmm_linear.variance.probe.probe import GradientProbe
from rmm_linear.variance.probe.results import ProbeResults, ProbeRow, WholeRow
from rmm_linear.variance.published import paper_bound, paper_sketch_variance
from rmm_linear.variance.simulation import Simulation, simulate_sgd_variance, simulate_variance
from rmm_linear.variance.survey.recommendation import quietest, recommend
from rmm_linear.variance.survey.records import LayerRecord, record_layers
from rmm_linear.variance.survey.survey import MEMORIES, MemoryNoise, describe, noise_at_memory, train_and_record
from rmm_linear.variance.targets import effective_batch, required_ratio
from rmm_linear.variance.whole_model import GradientNoise, gradient_noise

__all__ = [
    "MEMORIES",
    "GradientNoise",
    "GradientProbe",
    "LayerRecord",
    "MemoryNoise",
    "ProbeResults",
    "ProbeRow",
    "Simulation",
    "WholeRow",
    "correlation",
    "describe",
    "effective_batch",
    "gradient_noise",
    "noise_at_memory",
    "paper_bound",
    "paper_sketch_variance",
    "quietest",
    "recommend",
    "record_layers",
    "required_ratio",
    "sgd_variance",
    "simulate_sgd_variance",
    "simulate_variance",
    "sketch_variance",
    "train_and_record",
]

"""The noise of a weight gradient: what the sketch adds, and what minibatch sampling adds anyway."""

from rmm_linear.variance.closed_forms import sgd_variance, sketch_variance
from rmm_linear.variance.probe import GradientProbe
from rmm_linear.variance.results import ProbeResults, ProbeRow

__all__ = ["GradientProbe", "ProbeResults", "ProbeRow", "sgd_variance", "sketch_variance"]

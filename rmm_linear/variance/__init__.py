"""The noise of a weight gradient: what the sketch adds, and what minibatch sampling adds anyway."""

from rmm_linear.variance.closed_forms import sgd_variance, sketch_variance

__all__ = ["sgd_variance", "sketch_variance"]

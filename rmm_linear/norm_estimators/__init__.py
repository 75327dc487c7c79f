"""Norm estimators: predict ‖yᵢ‖ for the kinds that sample rows by importance (norm_rows, wta).

"none" uses ‖xᵢ‖ alone. "position", "token" and "position_token" are running means; they need nothing from the user and
work from the second step on. "sample_cache" and "sequence_cache" remember the last epoch by dataset index. The gradient
is unbiased with all of them; the prediction affects its variance only.
"""

from rmm_linear.norm_estimators.base import LayerCall, NormEstimator
from rmm_linear.norm_estimators.cache import SampleCache
from rmm_linear.norm_estimators.registry import make_norm_estimator, norm_estimators, register_norm_estimator
from rmm_linear.norm_estimators.running import RunningNorms
from rmm_linear.norm_estimators.samples import IndexedDataset, with_sample_index

__all__ = [
    "IndexedDataset",
    "LayerCall",
    "NormEstimator",
    "RunningNorms",
    "SampleCache",
    "make_norm_estimator",
    "norm_estimators",
    "register_norm_estimator",
    "with_sample_index",
]

"""Public names of the norm estimators, see :mod:`rmm_linear.norm_estimators`."""

from rmm_linear.norm_estimators import (
    IndexedDataset,
    LayerCall,
    NormEstimator,
    RunningNorms,
    SampleCache,
    make_norm_estimator,
    norm_estimators,
    register_norm_estimator,
    with_sample_index,
)

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

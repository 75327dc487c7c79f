"""Public names of the norm estimators, see :mod:`rmm_linear.norm_estimators`."""

from rmm_linear.norm_estimators import *  # noqa: F403
from rmm_linear.norm_estimators import __all__ as __all__

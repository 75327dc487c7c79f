"""An estimator by name for every test of this folder."""

import pytest
from estimator_helpers import Constant

from rmm_linear.estimators import register_norm_estimator


@pytest.fixture(autouse=True)
def _constant():
    register_norm_estimator("constant", Constant)

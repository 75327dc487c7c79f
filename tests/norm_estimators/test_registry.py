"""Names of norm estimators: those of the library, one's own, and wrong ones."""

import pytest
import torch
from estimator_helpers import CPU, Constant, call_of

from rmm_linear import RMMConfig
from rmm_linear.estimators import LayerCall, make_norm_estimator, norm_estimators, register_norm_estimator


@pytest.mark.parametrize("name", norm_estimators()[1:])
def test_an_empty_or_unknown_call_is_harmless(name):
    estimator = make_norm_estimator(name)
    assert estimator.predict(call_of(1, 3)) is None
    estimator.observe(LayerCall((0, 4), CPU), torch.zeros(0))
    estimator.observe(LayerCall((6,), CPU), torch.ones(6))
    assert estimator.predict(LayerCall((6,), CPU)) is None


def test_ones_own_estimator_has_a_name():
    assert "constant" in norm_estimators()
    assert RMMConfig.from_dict(RMMConfig(kind="wta", norm_estimator="constant").to_dict()).norm_estimator == "constant"
    register_norm_estimator("wrong", dict)
    with pytest.raises(TypeError, match="'wrong' must make a NormEstimator, got dict"):
        make_norm_estimator("wrong")


@pytest.mark.parametrize(("name", "factory"), [("token", Constant), ("", Constant), (3, Constant), ("new", None)])
def test_names_and_factories_are_checked(name, factory):
    with pytest.raises((TypeError, ValueError), match=r"must be new|must make an estimator"):
        register_norm_estimator(name, factory)


def test_a_configuration_with_a_wrong_estimator_is_refused():
    with pytest.raises(ValueError, match=r"must be one of none, position, .* got 'tokens'"):
        RMMConfig(kind="wta", norm_estimator="tokens")
    with pytest.raises(ValueError, match="got 'token' with kind='rows'"):
        RMMConfig(kind="rows", norm_estimator="token")
    with pytest.raises(ValueError, match=r"overrides\['query'\]: norm_estimator is for"):
        RMMConfig(kind="wta", norm_estimator="token", overrides={"query": {"kind": "rows"}})

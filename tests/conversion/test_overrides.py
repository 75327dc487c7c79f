"""What is left of overrides once an example has skipped modules."""

import pytest

from rmm_linear import RMMConfig
from rmm_linear.conversion.names import check_overrides, restricted

OVERRIDES = {
    r".*layer\.0.*": {"bits": 4, "norm_bits": 8},
    r".*query": {"bits": 8},
    r".*": {"norm_bits": 4, "mask_padding": False},
}
CHOSEN = {"layer.0.norm": "norm", "layer.1.norm": "norm", "layer.1.out": "linear"}


def test_overrides_keep_what_they_change_in_the_chosen_modules():
    config = RMMConfig(overrides=OVERRIDES)
    check_overrides(config, CHOSEN | {"layer.0.query": "linear"})
    found = restricted(config, CHOSEN)
    check_overrides(found, CHOSEN)
    assert found.target_modules == ("layer.1.out",)
    assert found.overrides == {r".*layer\.0.*": {"norm_bits": 8}, r".*": OVERRIDES[r".*"]}
    for name in CHOSEN:
        assert found.for_module(name).norm_bits == config.for_module(name).norm_bits


def test_an_override_without_effect_still_keeps_its_modules_from_those_after_it():
    config = RMMConfig(overrides={r".*layer\.0.*": {"bits": 4}, r".*": {"norm_bits": 8}})
    found = restricted(config, {"layer.0.norm": "norm", "layer.1.norm": "norm"})
    assert found.overrides == {r".*layer\.0.*": {}, r".*": {"norm_bits": 8}}
    assert [found.for_module(name).norm_bits for name in ("layer.0.norm", "layer.1.norm")] == [3, 8]
    assert "linear" not in found.operations


def test_fused_changes_activations_and_norms():
    for name in ("one.norm", "one.act"):
        config = RMMConfig(overrides={name: {"fused": True}})
        check_overrides(config, {"one.norm": "norm", "one.act": "activation"})
        assert [config.for_module(one).fused for one in ("one.norm", "one.act")] == [
            name == "one.norm",
            name == "one.act",
        ]
    with pytest.raises(
        ValueError, match="fused, which is a setting of the operation 'activation' or 'norm' or 'dropout', and matches"
    ):
        check_overrides(RMMConfig(overrides={"query": {"fused": True}}), {"query": "linear"})

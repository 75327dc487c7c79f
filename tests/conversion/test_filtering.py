"""A filter leaves modules of every operation exact, and its result is a configuration like any other."""

import pytest
from helpers import Mlp, converted_names, tiny_model
from torch import nn

from rmm_linear import RMMConfig, convert, revert
from rmm_linear.integrations.pretrained import convert_as_saved, save_conversion

FILTERS = {
    "one layer": lambda module, name: "layers.1." in name,
    "linear layers": lambda module, name: isinstance(module, nn.Linear),
    "no gated products": lambda module, name: not name.endswith("mlp"),
}


@pytest.mark.parametrize("kind", FILTERS)
def test_what_a_filter_accepts_is_converted_and_the_report_converts_the_same(kind):
    model, accepts = tiny_model("llama"), FILTERS[kind]
    report = convert(model, filter=accepts)
    found = converted_names(model)
    assert found
    assert all(accepts(model.get_submodule(name), name) for name in found)
    revert(model)
    everything = set(convert(model, dry_run=True).packed) | set(convert(model, dry_run=True).converted)
    assert {name for name in everything if accepts(model.get_submodule(name), name)} <= found
    convert(model, report.config)
    assert converted_names(model) == found


def test_the_parts_of_a_rejected_module_are_asked_for():
    model, asked = tiny_model("llama"), []
    report = convert(model, filter=lambda module, name: asked.append(name) or not name.endswith("mlp"))
    assert len(asked) == len(set(asked))
    assert "model.layers.0.mlp.act_fn" in report.packed
    assert report.skipped == dict.fromkeys([f"model.layers.{layer}.mlp" for layer in (0, 1)], "rejected by filter")


def test_a_rejected_module_is_in_the_report_and_in_the_file(tmp_path):
    model = tiny_model("llama")
    report = convert(model, exclude_modules=["k_proj"], filter=lambda module, name: not name.endswith("q_proj"))
    stem = "model.layers.0.self_attn"
    assert report.skipped[f"{stem}.q_proj"] == "rejected by filter"
    assert report.skipped[f"{stem}.k_proj"] == "in exclude_modules"
    save_conversion(model, tmp_path)
    twin = tiny_model("llama")
    convert_as_saved(twin, tmp_path)
    assert converted_names(twin) == converted_names(model)


@pytest.mark.parametrize("kind", FILTERS)
def test_every_rejected_module_is_in_the_report(kind):
    model, answers = tiny_model("llama"), {}
    accepts = lambda module, name: answers.setdefault(name, FILTERS[kind](module, name))  # noqa: E731
    report = convert(model, filter=accepts)
    rejected = {name for name, answer in answers.items() if not answer}
    assert {name for name, reason in report.skipped.items() if reason == "rejected by filter"} == rejected
    assert not rejected & report.uncompressed.keys()


def test_a_filter_may_reject_any_number_of_modules_whose_names_others_end_in(tmp_path):
    part = lambda: nn.ModuleDict({f"a_long_name_of_layer_{i}": nn.Linear(4, 4) for i in range(150)})  # noqa: E731
    make = lambda: nn.ModuleDict({**part(), "inner": part()})  # noqa: E731
    model, twin = make(), make()
    report = convert(model, filter=lambda module, name: name.startswith("inner.") and not name.endswith("0"))
    assert set(report.converted) == {f"inner.a_long_name_of_layer_{i}" for i in range(150) if i % 10}
    assert len(report.config.exclude_modules) == 2 * 15 + 1  # names, and a pattern for 135 others
    save_conversion(model, tmp_path)
    convert_as_saved(twin, tmp_path)
    assert converted_names(twin) == converted_names(model)


@pytest.mark.parametrize("given", [None, ["b"], r"b\..*"])
def test_a_name_is_excluded_alone_where_others_end_in_it(given):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.ModuleDict({"a": nn.Linear(4, 4), "c": nn.Linear(4, 4)})})
    model["d"] = nn.ModuleDict({"a": nn.Linear(4, 4)})
    report = convert(model, exclude_modules=given, filter=lambda module, name: name != "a")
    assert list(report.converted) == [*([] if given == r"b\..*" else ["b.a", "b.c"]), "d.a"]
    assert report.config.exclude_modules[-1] == "^(?:a)"


@pytest.mark.parametrize(
    ("filter", "error", "message"),
    [
        (lambda module, name: False, ValueError, r"rejects all 3 \(first, second, dropout\)"),
        (["first"], TypeError, r"filter must be a function of a module and its name, got \['first'\]"),
        (lambda name, module: name != "first", TypeError, "in this order, got one that takes name, module. Swap them"),
        (
            lambda one, other: "f" in one,
            TypeError,
            "in this order, .* got one that raises TypeError for 'first', Linear: ",
        ),
        (lambda one, other: other.weight, TypeError, "got one that raises AttributeError for 'first', Linear: 'str' "),
    ],
)
def test_a_mistake_leaves_the_model_alone(filter, error, message):
    model = Mlp(dropout=0.1)
    with pytest.raises(error, match=message):
        convert(model, RMMConfig(), filter=filter)
    assert not converted_names(model)

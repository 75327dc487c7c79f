"""RMMConfig: validated when it is made, immutable, and a JSON file that survives versions and crashes."""

import dataclasses
import json
import math
import os
import re

import pytest
import torch
from doc_pages import PAGES

from rmm_linear import RMMConfig, __version__
from rmm_linear._support import files
from rmm_linear.config import _relative_variance
from rmm_linear.packing import CODES, RELATIVE_VARIANCE, encoded_bytes
from rmm_linear.sketches import KINDS, has_blocks
from rmm_linear.spec import SaveSpec
from rmm_linear.variance import sketch_variance

FULL = RMMConfig(
    kind="gaussian",
    ratio=0.25,
    block=128,
    min_rows=7,
    target_modules=["query", "value"],
    exclude_modules=r".*\.0\..*",
    overrides={"query": {"ratio": 0.5}, r".*value": {"kind": "rows", "block": None}},
)


# Options: a new one is a decision, so it needs a line here, and a page that names it.
OPTIONS = {
    "kind": "countsketch",
    "ratio": None,
    "memory": None,
    "bits": "auto",
    "directions": 0,
    "block": None,
    "uniform_mix": 0.1,
    "norm_estimator": "none",
    "min_rows": 64,
    "mask_padding": True,
    "checkpointed": "exact",
    "operations": (
        "linear",
        "activation",
        "norm",
        "attention",
        "dropout",
        "logits",
        "experts",
        "convolution",
        "pooling",
    ),
    "activation_bits": 4,
    "norm_bits": 3,
    "attention_bits": 4,
    "fused": False,
    "target_modules": "all-linear",
    "exclude_modules": None,
    "overrides": {},
}


def test_options_and_their_defaults_are_those_of_the_table_and_docs_name_them():
    fields = {field.name: getattr(RMMConfig(), field.name) for field in dataclasses.fields(RMMConfig)}
    changed = {name: default for name, default in fields.items() if name not in OPTIONS or OPTIONS[name] != default}
    lines = "\n".join(f'    "{name}": {default!r},' for name, default in changed.items())
    assert not changed, f"RMMConfig has options or defaults that OPTIONS in {__file__} has not. Add the lines\n{lines}"
    gone = OPTIONS.keys() - fields.keys()
    assert not gone, (
        f"RMMConfig has lost {sorted(gone)}: saved files name them. Accept the old name, then remove it here"
    )
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unnamed = [name for name in fields if not re.search(rf"\b{name}\b", pages)]
    assert not unnamed, f"No page of docs/ names {unnamed}: say what each is for, and what its default is"


# Values


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"ratio": 1.5}, ValueError, r"ratio must be in \(0, 1\], got 1.5. Use ratio=1"),
        ({"ratio": math.nan}, ValueError, r"ratio must be in \(0, 1\], got nan"),
        ({"ratio": True}, TypeError, "ratio must be a number"),
        ({"kind": "count"}, ValueError, f"kind must be one of {', '.join(KINDS)}, got 'count'"),
        ({"kind": None}, ValueError, "kind must be one of"),
        ({"kind": "gaussian", "block": 2.0}, TypeError, "block must be a positive integer or None, got 2.0"),
        ({"kind": "rows", "block": 8}, ValueError, r"block is for .* only, got block=8 with kind='rows'. Use block="),
        ({"min_rows": 0}, ValueError, "min_rows must be at least 1, got 0"),
        ({"min_rows": None}, TypeError, "min_rows must be a positive integer, got None"),
        ({"target_modules": "(query"}, ValueError, r"target_modules must be a valid regular expression, got '\(query'"),
        ({"target_modules": []}, ValueError, "target_modules must name at least one layer"),
        ({"exclude_modules": 3}, TypeError, "exclude_modules must be a regular expression or a list"),
        ({"operations": ["linears"]}, ValueError, "operations must be one or more of linear, activation, norm"),
        ({"operations": []}, ValueError, "operations must be one or more of linear"),
        ({"operations": None}, TypeError, "operations must be a list of linear"),
        ({"activation_bits": 3}, ValueError, "activation_bits must be 8, 4, 2 or 1, got 3"),
        ({"norm_bits": True}, ValueError, "norm_bits must be 8, 4, 3 or 2, got True"),
        ({"fused": 1}, TypeError, "fused must be True or False, got 1"),
        ({"attention_bits": 2}, ValueError, "attention_bits must be 8 or 4, got 2. Fewer bits bias the gradient"),
        ({"checkpointed": "off"}, ValueError, 'checkpointed must be "exact" or "packed", got \'off\''),
        ({"overrides": [("query", {})]}, TypeError, "overrides must map a name pattern to fields, got list"),
        ({"overrides": {"query": 0.5}}, TypeError, r"overrides\['query'\] must map field names to values, got 0.5"),
        ({"overrides": {str(i): {} for i in range(1001)}}, ValueError, "at most 1000 patterns, got 1001. A regular"),
        ({"overrides": {"(": {}}}, ValueError, "overrides must be a valid regular expression"),
        ({"overrides": {"query": {"ratios": 1}}}, ValueError, r"overrides\['query'\] may change .*; got ratios"),
        ({"overrides": {"query": {"operations": ["norm"]}}}, ValueError, "may change .*; got operations"),
        ({"overrides": {"query": {"ratio": 2}}}, ValueError, r"overrides\['query'\]: ratio must be in"),
        ({"kind": "gaussian", "block": 8, "overrides": {"q": {"kind": "dct"}}}, ValueError, r"\['q'\]: block is for"),
    ],
)
def test_bad_values_are_named_with_the_rule(fields, error, message):
    with pytest.raises(error, match=message):
        RMMConfig(**fields)


@pytest.mark.parametrize("fields", [{"ratio": 1}, {"ratio": 1e-9}, {"min_rows": 1}] + [{"kind": k} for k in KINDS])
def test_values_at_the_edge_are_fine(fields):
    for name, value in fields.items():
        assert getattr(RMMConfig(**fields), name) == value


def test_block_is_for_the_dense_kinds():
    for kind in KINDS:
        if has_blocks(kind):
            assert RMMConfig(kind=kind, block=4).block == 4
        else:
            with pytest.raises(ValueError, match="block"):
                RMMConfig(kind=kind, block=4)


def test_it_is_frozen_and_keeps_its_own_containers():
    names, overrides = ["query"], {"query": {"ratio": 0.5}}
    config = RMMConfig(target_modules=names, overrides=overrides)
    names.append("value")
    overrides["query"]["ratio"] = 0.9
    overrides["value"] = {}
    assert list(config.target_modules) == ["query"]
    assert config.overrides == {"query": {"ratio": 0.5}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ratio = 0.5


# K


@pytest.mark.parametrize(
    ("ratio", "min_rows", "tokens", "rows"),
    [
        (0.1, 1, 1000, 100),
        (0.1, 64, 1000, 100),
        (0.1, 64, 500, 64),
        (0.1, 1, 4, 1),
        (0.16, 1, 10, 2),
        (0.14, 1, 10, 1),
        (0.001, 1, 2, 1),
    ],
)
def test_rows_are_the_rounded_ratio_and_min_rows_at_least(ratio, min_rows, tokens, rows):
    assert RMMConfig(ratio=ratio, min_rows=min_rows).spec(tokens, 8, 4).rows == rows


@pytest.mark.parametrize(
    ("ratio", "min_rows", "tokens"), [(0.1, 64, 64), (0.1, 64, 3), (1.0, 1, 10), (0.99, 1, 10), (0.1, 1, 0)]
)
def test_no_sketch_where_every_row_would_be_kept(ratio, min_rows, tokens):
    assert RMMConfig(ratio=ratio, min_rows=min_rows).spec(tokens, 8, 4) is None


# The code


def test_every_valid_row_is_saved_in_3_bits_by_default():
    every = SaveSpec("countsketch", 1000, bits=3)
    assert RMMConfig().spec(1000, 768, 4) == every
    assert RMMConfig().spec(1000, 768, 2, valid=300) == dataclasses.replace(every, rows=300)
    assert RMMConfig(bits=8).spec(1000, 768, 4) == dataclasses.replace(every, bits=8)
    assert RMMConfig(bits=None).spec(1000, 768, 4) is None
    assert RMMConfig(bits=None).spec(1000, 768, 4, valid=300) == dataclasses.replace(every, rows=300, bits=None)
    assert RMMConfig(ratio=0.2).spec(1000, 768, 4, valid=300) == dataclasses.replace(every, rows=200, bits=None)
    assert RMMConfig(kind="gaussian") == RMMConfig(kind="gaussian", memory=0.1)


ROW_BYTES = {None: 3072, **{bits: encoded_bytes(1, 768, bits) for bits in CODES}}


@pytest.mark.parametrize("valid", [1000, 400, 70])
@pytest.mark.parametrize("bits", ROW_BYTES)
def test_with_memory_every_valid_row_is_saved_in_the_widest_code_that_fits(bits, valid):
    """So padding makes room for wider ones."""
    for_all = valid * ROW_BYTES[bits] / (1000 * 3072)
    spec = RMMConfig(memory=for_all, min_rows=1).spec(1000, 768, 4, valid)
    assert spec == (None if for_all == 1 else SaveSpec("countsketch", valid, bits=bits))


@pytest.mark.parametrize("memory", [0.001, 0.01, 0.02, 0.03, 0.033])
def test_below_that_a_sketch_fills_the_memory(memory):
    """1 bit takes 0.0332."""
    spec = RMMConfig(memory=memory, min_rows=1).spec(1000, 768, 4)
    assert spec.rows < 1000
    assert spec.rows * ROW_BYTES[spec.bits] <= memory * 1000 * 3072 < (spec.rows + 1) * ROW_BYTES[spec.bits]


@pytest.mark.parametrize("share", [0.15, 0.4, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("bits", [None, *CODES])
def test_the_variance_by_which_a_code_is_chosen_is_that_of_rows_without_correlations(share, bits):
    """Of 600 · 70 products, each of a row with the others on its own; 2 in a hundred are what these data differ by."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(600, columns, generator=generator, dtype=torch.float64) for columns in (640, 70))
    x, y = (matrix / matrix.norm(dim=1, keepdim=True) for matrix in (x, y))
    found = sketch_variance(x, y, kind="countsketch", rows=round(share * 600), bits=bits) / 600
    code = 0.0 if bits is None else RELATIVE_VARIANCE[bits]
    assert float(found) == pytest.approx(_relative_variance("countsketch", share, code), rel=0.02, abs=1e-9)


# Overrides


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("query", "query"),
        ("encoder.0.query", "query"),
        ("encoder.0.subquery", r".*\.\d+\..*"),
        ("subquery", None),
        ("query.dense", None),
        ("encoder.1.value", r".*\.\d+\..*"),
        ("value", None),
    ],
)
def test_first_matching_override_is_taken(name, pattern):
    config = RMMConfig(ratio=0.1, overrides={"query": {"ratio": 0.5}, r".*\.\d+\..*": {"ratio": 0.7}})
    assert config.override_pattern(name) == pattern
    expected = {None: 0.1, "query": 0.5}.get(pattern, 0.7)
    assert config.for_module(name).ratio == expected
    assert config.for_module(name).overrides == {}


# Files


def test_dictionary_round_trip_is_plain_json():
    values = json.loads(json.dumps(FULL.to_dict()))
    assert RMMConfig.from_dict(values) == FULL
    assert RMMConfig.from_dict({}) == RMMConfig()


def test_file_round_trip_names_the_version(tmp_path):
    FULL.save(tmp_path / "rmm.json")
    assert RMMConfig.load(tmp_path / "rmm.json") == FULL
    assert json.loads((tmp_path / "rmm.json").read_text())["rmm_linear_version"] == __version__
    assert [path.name for path in tmp_path.iterdir()] == ["rmm.json"]


@pytest.mark.parametrize("version", [None, "0.0.1", __version__, 7])
def test_unknown_keys_are_an_error(version):
    values = {"ratio": 0.2, "speed": 3} | ({} if version is None else {"rmm_linear_version": version})
    with pytest.raises(ValueError, match=r"Unknown keys speed. A configuration has the fields kind, ratio"):
        RMMConfig.from_dict(values)


def test_unknown_keys_of_a_newer_version_are_a_warning():
    with pytest.warns(UserWarning, match="Ignoring speed: written by rmm_linear 99.0, .* Upgrade rmm_linear"):
        config = RMMConfig.from_dict({"ratio": 0.2, "operations": ["linear"], "speed": 3, "rmm_linear_version": "99.0"})
    assert config == RMMConfig(ratio=0.2, operations=["linear"])


@pytest.mark.parametrize("operations", [("dropout", "linear"), ["dropout", "linear"], {"linear", "dropout"}])
def test_operations_have_one_order(operations):
    assert RMMConfig(operations=operations).operations == ("linear", "dropout")
    assert RMMConfig(operations="norm").operations == ("norm",)


def test_versions_compare_as_numbers(monkeypatch):
    monkeypatch.setattr(RMMConfig, "version", "0.9.0")
    with pytest.warns(UserWarning, match="Ignoring speed"):
        RMMConfig.from_dict({"speed": 3, "rmm_linear_version": "0.10.0"})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"ratio": 3}', '{"speed": 1}', '{"min_rows": "a"}'])
def test_a_bad_file_is_named(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad.json is not a valid RMMConfig: "):
        RMMConfig.load(path)


def test_a_missing_file_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        RMMConfig.load(tmp_path / "none.json")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "rmm.json"
    FULL.save(path)

    def fail(*args):
        raise OSError("disk full")

    owner, name = (files.os, "fsync") if step == "fsync" else (files.Path, "replace")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="disk full"):
        RMMConfig(ratio=0.5).save(path)
    monkeypatch.undo()
    assert RMMConfig.load(path) == FULL
    assert [entry.name for entry in tmp_path.iterdir()] == ["rmm.json"]


def test_folders_are_made_and_a_folder_is_no_file(tmp_path):
    FULL.save(tmp_path / "new" / "deep" / "rmm.json")
    assert RMMConfig.load(tmp_path / "new" / "deep" / "rmm.json") == FULL
    with pytest.raises(IsADirectoryError, match=r"got the folder .*new\. Add the file's name"):
        FULL.save(tmp_path / "new")


def test_a_saved_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").write_text("")
    FULL.save(tmp_path / "rmm.json")
    assert os.stat(tmp_path / "rmm.json").st_mode == os.stat(tmp_path / "usual").st_mode

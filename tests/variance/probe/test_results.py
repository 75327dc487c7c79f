"""Which layers a GradientProbe takes, and the rows, tables and summaries that it leaves."""

import dataclasses
import math
import subprocess
import sys

import pandas as pd
import pytest
import torch
from cases import CONFIG
from helpers import Checkpointed, Mlp, snapshot, tiny_model
from torch import nn

from rmm_linear import RMMConfig, convert
from rmm_linear.variance import GradientProbe
from rmm_linear.variance.probe.results import COLUMNS, ProbeResults, ProbeRow

# Which layers


def test_modules_are_matched_as_target_modules_are():
    model = tiny_model("roberta")
    convert(model, CONFIG, target_modules=["query", "output.dense"])
    chosen = {
        None: 2 + 4,
        "all-linear": 14,
        r".*\.layer\.0\..*": 6,
        ("dense",): 2 * 3 + 1,
        ("attention.output.dense",): 2,
    }
    for modules, count in chosen.items():
        probe = GradientProbe(model, modules=list(modules) if isinstance(modules, tuple) else modules)
        assert len(probe._modules) == count, modules


def test_without_modules_a_plain_model_is_probed_where_the_config_would_convert():
    model = tiny_model("gpt2")
    assert set(GradientProbe(model)._modules) == set(convert(model, dry_run=True).converted)
    config = RMMConfig(target_modules=["c_fc"])
    assert set(GradientProbe(model, config=config)._modules) == {f"transformer.h.{i}.mlp.c_fc" for i in range(2)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 2.5}, TypeError, "every must be a positive integer or None, got 2.5"),
        ({"config": {"ratio": 0.1}}, TypeError, "config must be an RMMConfig or None, got dict"),
        ({"modules": ["frist"]}, ValueError, "got \\('frist',\\), which matches none. The nearest layers are first"),
        ({"modules": []}, ValueError, "must name at least one layer"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    model = Mlp()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        GradientProbe(model, **options)
    assert snapshot(model) == before


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="needs a model with linear layers inside, got Tanh without any"):
        GradientProbe(nn.Tanh())
    with pytest.raises(ValueError, match=r"got Linear without any. Wrap a single layer: torch.nn.Sequential\(layer\)"):
        GradientProbe(nn.Linear(3, 3))


def test_a_probe_that_saw_nothing_says_so(caplog):
    inner = Mlp()
    wrapper = nn.Sequential(inner)
    with GradientProbe(wrapper):
        inner(torch.randn(40, 12)).sum().backward()
    assert "saw no forward pass of Sequential in training mode" in caplog.text


# Results


def two_steps():
    model = Checkpointed(dropout=0.0)
    with GradientProbe(model, every=1, config=CONFIG) as probe:
        for _ in range(2):
            model(torch.randn(30, 6)).square().sum().backward()
    return probe


def test_csv_and_dataframe_hold_the_rows(tmp_path):
    probe = two_steps()
    path = tmp_path / "variance.csv"
    probe.to_csv(path)
    frame = probe.to_dataframe()
    assert tuple(frame.columns) == COLUMNS
    assert (
        *("step", "module", "kind", "rows", "bits", "tokens", "samples"),
        *("alpha", "sgd_variance", "sgd_variance_tokens", "sketch_variance", "noise"),
    ) == COLUMNS
    pd.testing.assert_frame_equal(pd.read_csv(path, float_precision="round_trip"), frame, check_exact=True)
    assert [ProbeRow(**row) for row in frame.to_dict("records")] == probe.rows
    assert [row.step for row in probe.rows] == [1, 1, 1, 2, 2, 2]
    assert [row.module for row in probe.rows] == ["block.0", "block.2", "head"] * 2
    ProbeResults().to_csv(path)
    assert path.read_text() == ",".join(COLUMNS) + "\n"
    assert list(ProbeResults().to_dataframe().columns) == list(COLUMNS)


def make_rows(noises, module="layer.{}.dense", samples="sequences"):
    return [
        ProbeRow(step, module.format(step), "rows", 4, 32, 40, samples, 0.01 * step, 1.0, 0.5, noise, noise)
        for step, noise in enumerate(noises, start=1)
    ]


def test_summary_has_median_and_quartiles_per_sort_of_module_and_over_all():
    results = ProbeResults()
    results.rows = [*make_rows([1.0, 2.0, 3.0, 4.0, 5.0]), *make_rows([10.0, math.nan], "head.{}")]
    lines = str(results).splitlines()
    text = {line.split()[1]: " ".join(line.split()) for line in lines if line.startswith("| ")}
    assert "5" in text["layer.{1-5}.dense"]
    assert "3 (2–4)" in text["layer.{1-5}.dense"]
    assert "0.03 (0.02–0.04)" in text["layer.{1-5}.dense"]
    assert "10 (10–10)" in text["head.{1-2}"]
    assert "3.5 (2.2–4.8)" in text["all"]


def test_what_is_no_number_is_left_out():
    results = ProbeResults()
    assert "none" in str(results)
    results.rows = [row for noise in (1.0, math.nan, 3.0) for row in make_rows([noise])]
    assert results.medians(1) == {"noise": 2.0, "alpha": 0.01}
    assert results.medians(2) == {}
    results.rows = make_rows([1.0, math.inf, math.inf])
    assert "inf" in str(results)
    assert "nan" not in str(results)


def test_noise_by_tokens_and_by_sequences_is_never_in_one_median():
    results = ProbeResults()
    results.rows = [*make_rows([2.0, 4.0]), *make_rows([0.0, 0.0, 9.0], "head", "tokens")]
    results.rows.sort(key=lambda row: row.step)
    assert [results.medians(step)["noise"] for step in (1, 2, 3)] == [2.0, 4.0, 9.0]
    lines = [line.replace("|", " ").split() for line in str(results).splitlines()]
    found = {tuple(line[:3]): line[3] for line in lines if len(line) > 3}
    assert found["layer.{1-2}.dense", "2", "sequences"] == found["all", "2", "sequences"] == "3"
    assert found["head", "3", "tokens"] == found["all", "3", "tokens"] == "0"


def test_rows_of_a_step_are_found():
    results, (row,) = ProbeResults(), make_rows([1.0])
    results.rows = [dataclasses.replace(row, step=50 * (place // 36)) for place in range(36_000)]
    assert [found.step for found in results.of_step(150)] == [150] * 36
    assert results.of_step(151) == results.of_step(-1) == results.of_step(10**6) == []


def test_pandas_is_imported_late_and_its_absence_explained(tmp_path):
    code = (
        "import sys\n"
        "import rmm_linear.variance as v, rmm_linear.integrations\n"
        "assert not {'pandas', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "sys.modules['pandas'] = None\n"
        "try:\n"
        "    v.ProbeResults().to_dataframe()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "sys.modules['transformers'] = None\n"
        "try:\n"
        "    import rmm_linear.integrations.transformers\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert "to_dataframe needs pandas" in first
    assert "pip install 'rmm_linear[glue]'" in first
    assert "pip install 'rmm_linear[glue]'" in second

"""Every report fits 100 columns, in short and whole, and is a table, HTML and a line too; names may be long."""

import functools
import re
import sys
from html import escape

import pytest
import torch
from helpers import tiny_model, token_ids
from peft_helpers import lora
from torch import nn

import rmm_linear
from rmm_linear._support.reports import Report
from rmm_linear._support.tables import WIDTH, folded, table
from rmm_linear.fitting.oom import OutOfMemoryReport
from rmm_linear.fitting.static_memory import StaticMemory
from rmm_linear.fitting.step_memory import StepMemory
from rmm_linear.fitting.ways import Way
from rmm_linear.memory import explain, peak, track_saved
from rmm_linear.memory.peak import LiveTensor, Peak
from rmm_linear.planning.blocks.measure import measure
from rmm_linear.planning.blocks.plan import BlockPlan, PlannedBlock
from rmm_linear.planning.chains.bptt_plans import plan_bptt
from rmm_linear.planning.chains.subsets import minimum_peak
from rmm_linear.planning.chains.sweep_settings import SweepReport
from rmm_linear.planning.graphs.plan import GraphPlan, PlannedPiece
from rmm_linear.variance import GradientNoise, GradientProbe, ProbeResults
from rmm_linear.variance.probe.results import ProbeRow

LONG = "a_name_that_goes_on_" * 6
NOTE = "offload is left out: " + "the model is on the CPU, whose memory it would use " * 4
IDS = {"input_ids": token_ids(8, 30)}
LABELLED = {**IDS, "labels": IDS["input_ids"]}


class Wide(nn.Module):
    """Layers of long names, one of which is called as a function is."""

    def __init__(self):
        super().__init__()
        blocks = [nn.ModuleDict({LONG: nn.Linear(32, 32), f"{LONG}act": nn.GELU()}) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block[f"{LONG}act"](block[LONG](x)))
        return x


def checkpointed_lora():
    model = lora("llama")
    model.gradient_checkpointing_enable()
    return rmm_linear.convert(model, example=LABELLED)


def after_a_step():
    model = tiny_model("roberta").train()
    report = rmm_linear.convert(model, dry_run=False, exclude_modules=["intermediate.dense"], kind="rows", ratio=0.25)
    model(**IDS).logits.sum().backward()
    return report


def block_plan(name="model.layers.{}", count=6):
    rows = [PlannedBlock("embed", "keep", 2**20, 2**21)]
    choices = ("recompute + offload", "convert", "convert")
    rows += [
        PlannedBlock(name.format(i), choices[i % 3], 2**24, 2**28, 0.0123, noise=0.01, host=2**20) for i in range(count)
    ]
    return BlockPlan(rows, 10**9, 9 * 10**8, 10**10, f"recomputation of {name.format(3)}.mlp.down_proj.lora_A", 1.234)


def fit_report(plan):
    made = Peak(10**9, moment=plan.moment)
    return rmm_linear.FitReport(
        plan, 10**9, StaticMemory(10**8, 10**6, 10**8, 2 * 10**8), 10**10, 9 * 10**8, 9 * 10**8, 9 * 10**8, 1.3, 2.7e-5,
        [NOTE], made, made, "the link between the device's memory and the host's", 10**11,
    )  # fmt: skip


def gradient_noise(names, draws):
    operations = ("all", "linear", "activation", "norm", "attention", "experts", "logits")
    found = {one: [{name: 0.123 * (1 + draw) for name in names} for draw in range(draws)] for one in operations}
    return GradientNoise(dict.fromkeys(names, 1.0), {one: every[0] for one, every in found.items()}, names, found)


def probe():
    results = ProbeResults()
    for i, samples in enumerate(("sequences", "sequences", "tokens")):
        row = (2, f"{LONG}.{i}.query", "countsketch", 205, 32, 2048, samples, 0.0123, 4.0, 2.0, 1.0, 0.0456 * (i + 1))
        results.rows.append(ProbeRow(*row))
    results.whole[2] = gradient_noise((f"{LONG}.0.query.weight",), 2)
    return results


def saved():
    model = Wide()
    with track_saved(model) as found:
        model(torch.ones(64, 32, requires_grad=True))
    return found


def live():
    with peak("cpu") as found:
        torch.ones(100).add(1).sum()
    found.moment = f"backward of {LONG}"
    found.alive = [LiveTensor(i, f"{LONG}.{i}", LONG, LONG, "saved", (10**6,) * 4, "float32") for i in range(20)]
    return found


def graph_plan():
    pieces = [PlannedPiece(f"{LONG}{i}", f"view_{i}", 1, "recompute", 2**20, 0.01) for i in range(40)]
    return GraphPlan("kusumoto-exact", "0" * 16, range(40), range(40), pieces, 10**9, 10**9, 10**10, 1.3)


def longest(plan):
    return rmm_linear.LongestSequence(
        131072, 1024, 8192, 4, plan, 10**10, 8 * 10**10, 12345.6, 10**11,
        "the link between the device's memory and the host's, in the recomputation of " + LONG, (NOTE,),
    )  # fmt: skip


def step():
    return StepMemory(StaticMemory(10**8, 10**6, 10**8, 2 * 10**8), live())


def out_of_memory():
    code = "for part in batch:\n    pass"
    ways = [Way(f"{place} parts of the batch", code, 10**9, 1.0, 0.01, True, NOTE) for place in range(5)]
    return OutOfMemoryReport(LONG, "9 parameters", "Batch 2 × 3.", step(), 10**9, ways, [NOTE])


CASES = {
    "converted": lambda: rmm_linear.convert(tiny_model("roberta"), example=IDS),
    "adapters": lambda: rmm_linear.convert(lora("llama", layers=12), example=LABELLED),
    "checkpointed": checkpointed_lora,
    "mixtral": lambda: rmm_linear.convert(tiny_model("mixtral"), example=LABELLED, operations=("linear", "norm")),
    "excluded": after_a_step,
    "wide": lambda: rmm_linear.convert(Wide(), example=torch.ones(512, 32), memory=0.1, block=8, kind="gaussian"),
    "explanation": lambda: explain(lora("llama", layers=12), LABELLED),
    "wide explanation": lambda: explain(Wide(), torch.ones(512, 32), operations=("linear",)),
    "nothing": lambda: explain(Wide().requires_grad_(False), torch.ones(512, 32)),
    "plan": block_plan,
    "wide plan": lambda: block_plan(LONG + ".{}", 40),
    "fit": lambda: fit_report(block_plan()),
    "wide fit": lambda: fit_report(block_plan("base_model." + LONG + ".{}")),
    "largest": lambda: rmm_linear.LargestBatch(4096, 1, 128, block_plan(), 10**10, 10**10, (NOTE,)),
    "longest": lambda: longest(block_plan()),
    "none fits": lambda: longest(None),
    "tiles": lambda: rmm_linear.TileReport(None, {f"{LONG}.{i}": "norm" for i in range(9)}, {f"{LONG}.9.x": NOTE}),
    "graph": graph_plan,
    "costs": lambda: measure(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh())] * 3), torch.ones(4, 8)),
    "noise": lambda: gradient_noise(tuple(f"base_model.{LONG}.{i}.weight" for i in range(3)), 2),
    "one draw": lambda: gradient_noise(("layer.0.weight", "layer.1.weight", "head"), 1),
    "probe": probe,
    "running probe": lambda: GradientProbe(nn.Sequential(nn.Linear(8, 8))),
    "saved": saved,
    "peak": live,
    "step": step,
    "out of memory": out_of_memory,
    "doctor": lambda: rmm_linear.doctor(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)), torch.ones(512, 32), noise=False
    ),
    "bptt": lambda: plan_bptt(10**4, slots=100),
    "chain": lambda: minimum_peak([1] * 100_000),
    "sweep": lambda: SweepReport(10**9, 10**10, 10**5, 10**6, 10**12, 10**6, 0.1, 0.1, 123456.789, 0.5),
}


@functools.cache
def report_of(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_a_report_fits_the_page_in_every_form(name):
    report = report_of(name)
    short, whole = str(report), report.table()
    for text in (short, whole):
        assert max(map(len, text.splitlines())) <= WIDTH, max(text.splitlines(), key=len)
        assert "*." not in text  # of modules that a star would not name
    assert short.startswith(report.summary().split("\n")[0]) or name == "bptt"
    assert len(short.splitlines()) <= len(whole.splitlines()) + 2  # what is hoisted
    assert len(repr(report)) < 250
    assert "\n" not in repr(report)
    assert " object at 0x" not in repr(report)
    page = report._repr_html_()
    lines = short.splitlines()
    headers = [lines[i - 1] for i, line in enumerate(lines) if line.startswith("|-")]
    found = re.findall(r"<table><thead>(.*?)</thead>", page)
    assert page.count("<table>") == len(found)
    assert ["|".join(re.findall("<th>(.*?)</th>", one)) for one in found] == [
        "|".join(escape(cell.strip()) for cell in header.strip("|").split("|")) for header in headers
    ]
    assert page.count("<tr>") == sum(line.startswith("| ") for line in short.splitlines())
    assert not re.search(r"<(?!/?(?:table|thead|tbody|tr|th|td|pre)>)", page)
    frame = report.to_dataframe()
    assert len(frame) == len(report._records())
    assert len(frame.columns) > 0 or name == "nothing"


def test_every_report_is_among_the_cases():
    def below(kind):
        return {one for child in kind.__subclasses__() for one in (child, *below(child))}

    found = {one.__name__ for one in below(Report) if one.__module__.startswith("rmm_linear.")}
    assert found - {"Plan"} == {type(report_of(name)).__name__ for name in CASES}


def test_without_pandas_a_report_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_dataframe needs pandas"):
        report_of("sweep").to_dataframe()


def test_the_first_line_counts_what_is_saved_compressed():
    """Of the linear layers; whoever greps for it must not take recomputed or frozen ones for converted ones."""
    report = report_of("checkpointed")
    counts = dict(re.findall(r"(\w+)=(\d+)", str(report).splitlines()[0]))
    assert counts.pop("converted") == "0"
    assert int(counts["exact_recomputed"]) + int(counts["frozen"]) == len(report.converted)
    assert int(counts["frozen"]) == len(report.frozen) > 0
    assert counts.keys() <= {"exact_recomputed", "frozen", "norm", "logits"}  # the last norm, which is in no block


def test_the_largest_gain_is_a_hint_by_the_bytes_of_the_report():
    report = report_of("checkpointed")
    block, (hint,) = report.memory.recomputed, report.hints()
    assert hint.startswith("checkpointing is on: 2 blocks are recomputed, and the modules inside stay exact. ")
    assert f"would save about {2 * block.packed / 2**10:.3g} KiB compressed" in hint
    assert str(report).splitlines()[1].startswith("hint: checkpointing is on: ")
    memory = report_of("mixtral").memory
    assert 1 <= len(memory.hints) <= 2
    shares = [int(re.search(r": (\d+)% stays", hint)[1]) for hint in memory.hints]
    assert shares == sorted(shares, reverse=True)
    stays = sum(one.bytes for one in memory.remaining if "does not have 'experts'" in one.reason)
    assert any(f": {stays / memory.before:.0%} stays, add 'experts' to operations" in hint for hint in memory.hints)
    assert not report_of("converted").hints()


def test_shares_are_of_all_that_the_model_saved_before():
    for name in ("adapters", "explanation"):
        memory = getattr(report_of(name), "memory", report_of(name))
        shares = {n: 100 * m.after / memory.before for n, m in memory.operations.items()}
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(memory).splitlines()]
        assert {row[0]: row[-1] for row in cells if row and row[0] in shares} == {
            name: f"{share:.1f}" for name, share in shares.items() if memory.operations[name].before
        }
        assert sum(shares.values()) == pytest.approx(100 * memory.after / memory.before)


def test_layers_of_an_explanation_that_are_alike_share_a_row_and_silent_ones_have_none():
    found = report_of("explanation")
    seen = {name: one for name, one in found.layers.items() if one.before or one.after}
    rows = [line.split("|") for line in str(found).split("| layer ")[1].splitlines() if "layers.{0-11}" in line]
    assert 0 < 12 * len(rows) == len(seen) < len(found.layers)
    assert sum(int(row[3].replace(",", "")) for row in rows) == sum(one.before for one in seen.values())
    assert f"Linear layers that save nothing of their own: {len(found.layers) - len(seen)}" in str(found)
    assert len(found.table().split("| layer ")[1].splitlines()) > len(found.layers)


def test_patterns_stand_for_exactly_their_names():
    names = ["a.0.b.1", "a.0.b.2", "a.1.b.1", "a.1.b.2", "a.3.b.1", "a.3.c", "a.x", "0", "1", "12", "a.01.b.1", ""]
    found = folded(names)
    assert sorted(name for group in found.values() for name in group) == sorted(names)
    assert {pattern: len(group) for pattern, group in found.items()} == {
        "a.{0-1}.b.{1-2}": 4, "a.3.b.1": 1, "a.3.c": 1, "a.x": 1, "{0-1,12}": 3, "a.01.b.1": 1, "": 1,
    }  # fmt: skip


@pytest.mark.parametrize("columns", [2, 5, 12])
def test_a_table_loses_nothing_of_what_it_cuts(columns):
    cells = [f"{LONG}{i}" if i % 2 else f"word {i} " * 20 for i in range(columns)]
    text = table([f"column {i}" for i in range(columns)], [cells], 80)
    assert max(map(len, text.splitlines())) <= 80
    notes = "".join(text[text.index("\n\n[1] ") :].split())
    assert all("".join(cell.split()) in notes for cell in cells)

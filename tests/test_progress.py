"""Lines on stderr that say how far a long call is: where, for whom, how many, and how long it will take."""

import io
import logging
import re
import sys
import threading

import pytest
import torch
from fit_cases import network, stack
from fit_helpers import fitting
from torch import nn

import rmm_linear
from rmm_linear._support import progress
from rmm_linear._support.progress import counting, expect, reporting, stage
from rmm_linear.integrations.fit_settings import as_json, read_fit
from rmm_linear.planning import plan_blocks, plan_graph
from rmm_linear.variance import gradient_noise, noise_at_memory, train_and_record

MODEL = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(32, 32), nn.Tanh())))
X = torch.ones(64, 32)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """Put a terminal in the place of stderr, which pytest sets anew after fixtures."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return found


def call(name="call", shown=True):
    with reporting(name, shown):
        stage("first")
        with counting("counted", 3) as begins:
            for number in range(3):
                begins(f"step {number}")


def texts(err):
    return [line.rpartition(" · ")[0] for line in err.splitlines()]


def test_a_line_per_stage_has_the_time_so_far(capsys):
    call()
    lines = capsys.readouterr().err.splitlines()
    assert texts("\n".join(lines)) == [
        "call: first", "call: counted", "call: counted, 1 of 3: step 0", "call: done",
    ]  # fmt: skip
    assert all(re.search(r" · \d+\.\d s$", line) for line in lines)


def test_steps_that_are_counted_have_a_bar_on_a_terminal(monkeypatch):
    shown, before = terminal(monkeypatch), set(threading.enumerate())
    call(shown=None)
    assert "call: counted: 100%" in shown.getvalue()
    assert "3/3" in shown.getvalue()
    assert set(threading.enumerate()) == before  # none that could wake up while something is timed


def test_without_tqdm_there_are_lines_on_a_terminal(monkeypatch):
    out = terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(progress, "_APART", -1.0)
    call(shown=None)
    assert texts(out.getvalue())[2:-1] == [f"call: counted, {n} of 3: step {n - 1}" for n in (1, 2, 3)]


@pytest.mark.parametrize(("shown", "level", "says"), [
    (None, logging.WARNING, False), (None, logging.INFO, True), (True, logging.WARNING, True),
    (False, logging.INFO, False),
])  # fmt: skip
def test_it_is_said_where_someone_reads_it(shown, level, says, capsys, caplog):
    with caplog.at_level(level, "rmm_linear"):
        call(shown=shown)
    assert bool(capsys.readouterr().err) is says


@pytest.mark.parametrize(("connected", "rank", "environment"), [(True, 1, "0"), (False, 0, "3")])
def test_other_processes_are_silent(connected, rank, environment, monkeypatch, capsys):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: connected)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setenv("RANK", environment)
    call()
    assert capsys.readouterr().err == ""


def test_calls_inside_of_a_call_are_a_part_of_it(capsys):
    with reporting("outer", True):
        call("inner", None)
        call("inner", False)
        stage("last")
    assert texts(capsys.readouterr().err) == [
        "outer: first", "outer: counted", "outer: counted, 1 of 3: step 0", "outer: last", "outer: done",
    ]  # fmt: skip


def test_nothing_is_left_by_an_error_nor_seen_by_other_threads(capsys):
    def fails():
        with reporting("fails", True), counting("counted", 2) as begins:
            begins("one")
            thread = threading.Thread(target=stage, args=("of another thread",))
            thread.start()
            thread.join()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fails()
    stage("after it")
    assert texts(capsys.readouterr().err) == ["fails: counted", "fails: counted, 1 of 2: one"]


def test_a_stream_that_is_closed_or_missing_ends_no_call(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        call()
        call(shown=None)


def test_a_wrong_argument_is_named():
    with pytest.raises(TypeError, match=r"progress must be True, False, or None .* got 'yes'"):
        rmm_linear.fit(MODEL, X, 0.9, progress="yes")


def test_a_callback_hands_it_on_and_a_resumed_run_does_not_compare_it():
    settings = read_fit({"memory": "8GB", "progress": True})
    assert (settings["progress"], as_json(settings)) == (True, {"memory": "8GB"})
    with pytest.raises(TypeError, match="progress must be True, False, or None"):
        read_fit({"memory": "8GB", "progress": 1})


@pytest.mark.thorough
def test_a_fit_in_a_trainer_says_its_stages(tmp_path, capsys):
    fitting(tmp_path, {"memory": 0.8, "allow": ["keep", "recompute"], "progress": True}, max_steps=1)[0].train()
    assert "fit: checking by a real step" in texts(capsys.readouterr().err)


def test_numbers_of_steps_are_round(capsys):
    with reporting("call", True):
        expect(1234.5, 130.0)
        expect(0.2, of="simulated steps", what="planning: ")
    assert texts(capsys.readouterr().err)[:2] == [
        "call: about 1,200 steps' time in all, 2 min 10 s", "call: planning: about 1 simulated steps",
    ]  # fmt: skip


def test_a_fit_says_its_stages(capsys):
    rmm_linear.fit(stack().train(), torch.ones(64, 8), 0.8, allow=("keep", "recompute"), progress=True)
    said = texts(capsys.readouterr().err)
    assert said[:2] == ["fit: looking at the blocks", "fit: simulating the exact step"]
    assert re.match(r"fit: about [\d,]+ steps' time in all, \d", said[3])
    for one in ("measuring options, 1 of 3: recompute", "timing options", "solving", "checking by a real step"):
        assert f"fit: {one}" in said


def test_a_fit_finds_the_same_without_lines(capsys):
    """On the meta device, where times, which differ every time, do not choose."""
    found = []
    for shown in (True, False):
        torch.manual_seed(1)
        model, batch = stack().train().to("meta"), torch.ones(64, 8, device="meta")
        plan = rmm_linear.fit(model, batch, 0.8, allow=("keep", "recompute"), progress=shown).plan.to_dict()
        found.append((plan, float(torch.rand(1)), bool(capsys.readouterr().err)))
    assert found[0][:2] == found[1][:2]
    assert [one[2] for one in found] == [True, False]


BATCH = {"input_ids": torch.ones(4, 20, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}


@pytest.mark.parametrize(
    ("name", "run", "stages"),
    [
        ("max_batch", lambda: rmm_linear.max_batch(MODEL, X, "200KB", allow=("keep", "recompute"), progress=True),
         ["searching exactly", "measuring options again, in a smaller batch", "searching with plans"]),
        ("max_length", lambda: rmm_linear.max_length(MODEL, X.view(1, 64, 32), "200KB", allow=("keep", "recompute"),
                                                     multiple=8, progress=True), ["searching exactly"]),
        ("plan_blocks", lambda: plan_blocks(MODEL, X, "least", progress=True),
         ["measuring options, 1 of 3: recompute"]),
        ("plan_graph", lambda: plan_graph(MODEL, X, "least", method="chen", progress=True),
         ["capturing the graph", "proposing by chen", "simulating a proposal"]),
        ("gradient_noise", lambda: gradient_noise(network("roberta")[0], BATCH, by_operation=False, progress=True),
         ["variance of the whole gradient, 1 of 2: of the minibatch"]),
    ],
)  # fmt: skip
def test_planners_and_measurements_say_how_long_they_take(name, run, stages, capsys):
    run()
    said = texts(capsys.readouterr().err)
    assert {one.partition(":")[0] for one in said} == {name}
    assert len([one for one in said if re.search(r"about [\d,]+ (simulated steps|steps' time)", one)]) == 1
    assert said[-1] == f"{name}: done"
    for one in stages:
        assert f"{name}: {one}" in said


def test_layers_are_counted_as_their_variance_is_computed(capsys):
    records = train_and_record(network("roberta")[0], [BATCH, BATCH], progress=True)
    noise_at_memory(records, kinds=["rows"], widths=[None], memories=[0.5], progress=True)
    said = texts(capsys.readouterr().err)
    assert said[:2] == ["train_and_record: exact training: about 2 steps' time", "train_and_record: training"]
    assert f"noise_at_memory: variance ratios of layers, 1 of {len(records)}: {records[0].name}" in said


FITS = {
    "stack": lambda said: rmm_linear.fit(*network("stack"), 0.6, progress=said),
    "roberta": lambda said: rmm_linear.fit(*network("roberta"), 0.6, progress=said),
    "llama": lambda said: rmm_linear.fit(*network("llama"), 0.6, progress=said),
    "gpt2": lambda said: rmm_linear.fit(*network("gpt2"), 0.7, progress=said),
    "max_batch": lambda said: rmm_linear.max_batch(*network("stack"), "200KB", progress=said),
    "plan_blocks": lambda said: plan_blocks(*network("roberta"), "least", progress=said),
    "plan_graph": lambda said: plan_graph(*network("roberta"), "least", progress=said),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FITS)
def test_what_is_said_beforehand_holds_within_a_factor_of_two(kind, monkeypatch, capsys):
    """By the time of this process, as others run on the machine; the first call loads what all need."""
    monkeypatch.setattr(progress.time, "perf_counter", progress.time.process_time)
    FITS[kind](None)
    begin = progress.time.process_time()
    FITS[kind](True)
    seconds = progress.time.process_time() - begin
    found = re.search(r"in all, ([\d.]+) s", capsys.readouterr().err)
    assert seconds / 2 <= float(found[1]) <= 2 * seconds

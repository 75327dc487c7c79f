"""Plan files: whatever is wrong in one, loading says so and names it; what loads can be used."""

import copy
import functools
import json
import math

import pytest
import torch
from torch import nn

from rmm_linear.fitting.settings import Conversions
from rmm_linear.planning import (
    BlockPlan,
    BPTTPlan,
    ChainPlan,
    PlannedBlock,
    checkpoint_chain,
    load_plan,
    order,
    plan_graph,
)
from rmm_linear.planning.budget import read_budget
from rmm_linear.planning.graphs.capture import capture
from rmm_linear.planning.graphs.pieces import simulate_graph
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step.step import run_step

pytestmark = pytest.mark.usefixtures("no_graphs_left")
WRONG = (None, "x", -1, 1.5, [], {}, True, math.nan)
DROPPED = object()


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(3)))


def batch():
    return torch.ones(200, 64)


def blocks(folder):
    rows = [
        PlannedBlock("0", "nested", 100, 1000, 0.5, inner=("0.0", "0.2")),
        PlannedBlock("1", "selective", 10, 20, -0.25),
        PlannedBlock("2", "offload", seconds=1.0),
    ]
    return BlockPlan(rows, 4000, 3000, 2000, "backward of 0", 1.25, folder=str(folder))


def converted(folder):
    rows = [PlannedBlock("0", "convert", setting="others"), PlannedBlock("1", "keep")]
    rows.append(PlannedBlock("2", "convert", 5, 6, -0.5, setting="linears", noise=0.25))
    return BlockPlan(rows, config=Conversions(network(), ["0", "1", "2"]).configure(rows))


def use_blocks(path, folder):
    plan, model = load_plan(path, folder=folder), network()
    str(plan)
    json.dumps(plan.to_dict())
    plan.apply(model)
    run_step(model, batch())
    plan.revert()


def graph(folder):
    return plan_graph(network(), batch(), memory="least", method="chen")


def ordered(folder):
    return order(network(), batch(), graph(folder))


@functools.cache
def measured():
    return graph_costs(*capture(network(), batch()))


def use_graph(path, folder):
    plan = load_plan(path)
    str(plan)
    json.dumps(plan.to_dict())
    plan.apply(network())
    plan.check(measured().graph, measured().inputs)
    assert simulate_graph(measured(), plan.of(measured())).bytes
    assert plan.method == "order" or read_budget(plan.asked or plan.memory or 1, 1000) >= 0  # of other shapes


def use_chain(path, folder):
    plan = ChainPlan.load(path)
    str(plan)
    if plan.kept[-1] == 3:
        checkpoint_chain([*network()], batch(), plan).sum().backward()


def use_bptt(path, folder):
    plan = BPTTPlan.load(path)
    str(plan)
    assert sum(1 for _ in plan.actions()) > 1


PLANS = {
    "blocks": (blocks, use_blocks),
    "converted": (converted, use_blocks),
    "graph": (graph, use_graph),
    "ordered": (ordered, use_graph),
    "chain": (lambda folder: ChainPlan(1000, (0, 2, 3)), use_chain),
    "bptt": (lambda folder: BPTTPlan(20, 4, 2, 100, 200, 250), use_bptt),
    "states": (lambda folder: BPTTPlan(20, 4), use_bptt),
}


def paths(value, path=()):
    """Where something is: fields, and of long lists the first two entries."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, entry in inside:
        yield from paths(entry, (*path, key))


def mutations(saved):
    """A path, a value that is put there, and what is then saved."""
    for path in paths(saved):
        for value in (DROPPED, *WRONG):
            changed = copy.deepcopy(saved)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if type(parent[path[-1]]) is type(value) and parent[path[-1]] == value:
                continue
            if isinstance(value, str) and isinstance(parent[path[-1]], str) and path[-1] != "choice":
                continue  # another name, and no wrong type
            if value is DROPPED:
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            yield path, value, changed


@pytest.mark.parametrize("kind", PLANS)
def test_what_is_wrong_in_a_file_is_said_when_it_is_read(kind, tmp_path):
    make, use = PLANS[kind]
    path, folder = tmp_path / "plan.json", tmp_path / "files"
    folder.mkdir()
    make(folder).save(path)
    saved = json.loads(path.read_text())
    use(path, str(folder))
    refused, failed, count = 0, [], 0
    for where, value, changed in mutations(saved):
        count += 1
        path.write_text(json.dumps(changed))
        try:
            use(path, str(folder))
        except Exception as error:  # of any class, to be told apart
            if isinstance(error, ValueError) and "plan.json" in str(error):
                refused += 1
            elif "must match a converted module, and matches none" not in str(error):  # a valid plan of another model
                failed.append((where, value, repr(error)[:150]))
    assert failed == []
    assert refused > count / 3


def test_a_file_does_not_choose_where_files_are_written(tmp_path):
    path, theirs, ours = tmp_path / "plan.json", tmp_path / "theirs", tmp_path / "ours"
    blocks(theirs).save(path)
    plan, model = load_plan(path), network()
    assert plan.folder is None
    with pytest.raises(ValueError, match=r"no folder.*Give folder=\.\.\. to fit, load_plan or"):
        plan.apply(model)
    assert not any("forward" in vars(module) for module in model.modules())
    load_plan(path, folder=ours).apply(model)
    model(torch.ones(5000, 64)).sum().backward()
    assert ours.is_dir()
    assert not theirs.exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"memory": "4GB"}, "memory must be int, got '4GB'"),
        ({"memroy": 1}, r"memroy is no field of .*\. Did you mean 'memory'\?"),
        ({"blocks": [{"name": "0", "choice": "keep"}] * 2}, "one row each, got '0' twice"),
        (
            {"blocks": [{"name": "0", "choice": "keep", "inner": ["a", 3]}]},
            r"blocks\[0\]\.inner\[1\] must be str, got 3",
        ),
        ({"blocks": [{"name": "0", "choice": "nested"}]}, "must have inner parts, got none"),
        ({"blocks": [{"name": "0", "choice": "convert", "setting": "tenth"}]}, "config must be there where"),
        ({"blocks": [{"name": "0", "choice": "kept"}]}, "choice must be one of keep, recompute"),
        ({"blocks": [{"choice": "keep"}]}, r"blocks\[0\]\.name is missing"),
        ({"predicted": -5}, "predicted must be at least 0, got -5"),
    ],
)
def test_an_error_names_the_file_the_field_and_what_it_must_be(change, text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**blocks(tmp_path).to_dict(), **change}))
    with pytest.raises(ValueError, match=text) as caught:
        load_plan(path)
    assert str(path) in str(caught.value)

"""What lives at the peak of a step is what a real step has, and ways out take what they say."""

import copy
import gc
import json

import pytest
import torch
from planning_graph_helpers import network, real_peak
from quantized_helpers import SHAPE, in_bitsandbytes, with_adapters
from quantized_helpers import batch as tokens
from quantized_helpers import llama as large_llama
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import rmm_linear
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.fitting.step_memory import step_memory
from rmm_linear.memory.peak import GRADIENTS, RECOMPUTED, SAVED, TEMPORARY
from rmm_linear.planning import explain_oom, simulate
from rmm_linear.planning.step.flash import as_on_gpu
from rmm_linear.planning.step.step import loss_of, run_step
from rmm_linear.planning.step.twin import without_weights
from rmm_linear.planning.step.watch import watch
from rmm_linear.planning.step.workspace import allocator_peak

ROWS, WIDTH, INNER = 256, 16, 64


def mlp(blocks=3):
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)) for _ in range(blocks))
    return nn.Sequential(*layers)


def rows(count=ROWS):
    return torch.randn(count, WIDTH)


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 256), nn.Sigmoid())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


# The peak


@pytest.mark.parametrize("name", ["llama", "roberta", "cnn"])
def test_the_peak_is_that_of_the_real_step_and_the_sum_of_its_parts(name):
    model, batch = network(name)
    found = step_memory(model, batch, static_memory(model, torch.optim.AdamW))
    assert found.passes.bytes == pytest.approx(real_peak(model, batch), rel=0.01)
    assert found.peak == sum(found.parts().values())
    assert sum(found.passes.by_kind.values()) == sum(one.bytes for one in found.passes.alive) == found.passes.bytes
    weights = sum(p.nbytes for p in model.parameters())
    before = 3 * weights + found.static.buffers + found.static.optimizer - 2 * weights
    assert found.by_pass["backward"] == (before + found.passes.bytes, found.moment.removeprefix("backward of "))
    assert json.loads(json.dumps(found.to_dict()))["by_module"] == found.passes.by_module


def test_tensors_are_told_apart_by_their_kind():
    """The sizes of all that lives when the activation between two layers is differentiated."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Sigmoid(), nn.Linear(32, 64, bias=False))
    found = simulate(model, torch.ones(10, 8))
    alive = {(one.module, one.operation, one.kind): one.bytes for one in found.alive}
    assert found.moment == "backward of 1"
    assert alive[("1", "sigmoid", SAVED)] == 10 * 32 * 4
    assert alive[("2", "mm", GRADIENTS)] == 64 * 32 * 4
    assert alive[("1", "sigmoid_backward", TEMPORARY)] == 10 * 32 * 4
    assert found.largest[0].bytes == max(alive.values())
    assert {one.module_class for one in found.alive if one.operation == "sigmoid"} == {"Sigmoid"}
    again = {one.operation: one.bytes for one in simulate(Again(), torch.ones(10, 8)).alive if one.kind == RECOMPUTED}
    assert again["sigmoid"] == 10 * 256 * 4
    twice = nn.Sequential(nn.Linear(64, 64, bias=False))
    static = static_memory(twice)
    first, later = (step_memory(twice, torch.ones(4, 64), static, accumulate=flag) for flag in (False, True))
    assert (first.gradients, later.gradients) == (64 * 64 * 4,) * 2
    assert later.peak - first.peak == pytest.approx(64 * 64 * 4, abs=4 * 64 * 4)  # the first ones, and those to add


def test_a_gpu_saves_masks_of_dropout_in_bytes_and_no_scores():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x):
            y = self.proj(x)
            return F.dropout(F.scaled_dot_product_attention(y, y, y, None, 0.5), 0.5, self.training)

    with torch.device("meta"):
        model, x = Attends(), torch.empty(2, 4, 32, 8)

    def made():
        return {(event.made.func._opname, event.made.dtype) for event in watch(model, x)[1].events if event.made}

    cpu = made()
    with as_on_gpu():
        gpu = made()
    assert ("_safe_softmax", torch.float32) in cpu - gpu
    assert ("native_dropout", torch.bool) in gpu - cpu
    assert F.dropout.__name__ == "dropout"


# The copy without weights


def shared():
    model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32))
    model[1].weight = model[0].weight
    model[2].register_buffer("part", model[2].running_mean[:4])
    model[1].requires_grad_(False)
    model.eval()
    model.kept = [torch.ones(3), {"a": torch.ones(2, 2).t()}]
    model[0].register_forward_hook(print)
    return model


def test_a_copy_without_weights_has_the_form_of_its_model():
    model = shared()
    twin = without_weights(model)
    assert {p.device.type for p in (*twin.parameters(), *twin.buffers(), twin.kept[0], twin.kept[1]["a"])} == {"meta"}
    assert twin[1].weight is twin[0].weight
    assert not twin[1].weight.requires_grad
    assert twin[2].part.untyped_storage()._cdata == twin[2].running_mean.untyped_storage()._cdata
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]
    assert [*twin[0]._forward_hooks.values()] == [print]
    assert model.kept[0].tolist() == [1, 1, 1]
    assert static_memory(twin) == static_memory(model)
    model.broken = (one for one in ())
    with pytest.raises(ValueError, match=r"cannot be copied: TypeError: .*generator.* Remove what copy.deepcopy"):
        without_weights(model)


@pytest.mark.parametrize("change", ["quantized", "converted", "planned"])
def test_a_copy_without_weights_takes_the_bytes_of_its_model(change):
    model, batch = mlp(), rows()
    if change == "quantized":
        model, batch = with_adapters(in_bitsandbytes(large_llama(dtype=torch.float32), 4)), tokens()
    elif change == "converted":
        rmm_linear.convert(model)
        run_step(model, batch)  # the first one is checked
    else:
        rmm_linear.planning.plan_blocks(model, batch, "least").apply()
    twin = without_weights(model)
    assert simulate(twin, batch).bytes == pytest.approx(simulate(model, batch).bytes, rel=0.01)
    assert static_memory(twin) == static_memory(model)


# Ways out


def taken(way, model, batch):
    """The bytes of a real process after a way's code, without those of an optimizer."""
    model = copy.deepcopy(model)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if way.code.startswith("for part"):
        *_, last = way.code.split("/ ")
        parts = int(last.split(")")[0])
        run_step(model, tree_map(lambda one: one.chunk(parts)[0], batch))
        gc.collect()
        gradients = sum(p.nbytes for p in model.parameters())
        with rmm_linear.memory.peak("cpu") as measured:
            exec(way.code, {"model": model, "batch": batch, "loss_of": loss_of})
        return weights + gradients + measured.bytes
    exec(way.code, {"model": model, "batch": batch, "rmm_linear": rmm_linear})
    run_step(model, batch)
    return weights + real_peak(model, batch)


def causal():
    model, batch = network("llama")
    return model.train(), {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}


@pytest.mark.parametrize("make", [lambda: (mlp(4), rows()), pytest.param(causal, marks=pytest.mark.thorough)])
def test_ways_fit_and_take_what_they_say(make):
    model, batch = make()
    exact = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) + real_peak(model, batch)
    memory = int(0.75 * exact)
    found = explain_oom(model, batch, memory)
    assert found.now.peak == exact
    assert not found.fits
    fitting = [way for way in found.ways if way.fits]
    assert {"compressed activations", "one plan", "checkpointing"} <= {way.name for way in fitting}
    assert [way.time for way in fitting] == sorted(way.time for way in fitting)
    for way in found.ways:
        assert way.fits == (way.peak <= memory)
        if way.name != "one plan":  # which is chosen by times, where there are any
            assert taken(way, model, batch) == pytest.approx(way.peak, rel=0.03), way
    times = {way.name: way.time for way in found.ways}
    assert 1.15 < times["checkpointing"] < 1.45
    assert all(way.code.split("\n")[0] in str(found) for way in found.ways[:3])
    assert json.loads(json.dumps(found.to_dict()))["ways"][0]["code"] == found.ways[0].code


def test_nothing_of_the_steps_size_is_allocated_and_without_a_budget_ways_say_what_they_reach(monkeypatch):
    model, batch = mlp(), rows(16 * ROWS)
    monkeypatch.setattr("rmm_linear.fitting.ways.WaySearch._fitted", lambda self: None)  # most of the time
    reports = []
    assert allocator_peak(lambda: reports.append(explain_oom(model, batch))) < 0.05 * real_peak(model, batch)
    (found,) = reports
    assert (found.memory, found.fits, {way.fits for way in found.ways}) == (None, None, {None})
    assert all(way.peak < found.now.peak for way in found.ways)
    assert "| time " in found.table()


CHANGED = {
    "converted": (lambda model: rmm_linear.convert(model), "6 modules converted", "rmm_linear.revert(model)\n"),
    "planned": (
        lambda model: rmm_linear.planning.plan_blocks(model, rows(), "least").apply(),
        "plan: ",
        "rmm_linear.revert(model)\n",
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_is_on_already_is_said_and_not_offered_again(kind):
    change, words, before = CHANGED[kind]
    model = mlp(2).eval()
    change(model)
    found = explain_oom(model, rows(), 0.9)
    assert words in found.weights
    assert {"compressed activations", "checkpointing"}.isdisjoint(way.name for way in found.ways)
    assert all(way.code.startswith(before) for way in found.ways if way.name == "one plan")
    assert not any(module.training for module in model.modules())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adapters", "4 bits", "checkpointed", "compiled"])
def test_ways_of_adapters_quantized_weights_and_checkpointed_models(kind, monkeypatch):
    monkeypatch.setitem(SHAPE, "num_hidden_layers", 4)
    model, batch = large_llama(dtype=torch.float32), {name: one.repeat(16, 1) for name, one in tokens().items()}
    if kind != "compiled":
        model = with_adapters(in_bitsandbytes(model, 4) if kind == "4 bits" else model)
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = explain_oom(torch.compile(model) if kind == "compiled" else model, batch, 0.9, optimizer=torch.optim.AdamW)
    names = [way.name for way in found.ways]
    assert ("checkpointing, loss in chunks" in names) == (kind != "checkpointed")
    assert found.ways[0].fits
    assert {"4 bits": "weights quantized", "checkpointed": "checkpointing: on", "compiled": "all trained"}.get(
        kind, "layers with LoRA"
    ) in found.weights
    assert any('checkpointed="packed"' in way.code for way in found.ways) == (kind == "checkpointed")


# What is refused


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x):
        if x.sum() > 0:
            raise KeyError("x")
        return self.layer(x)


class Fails(Reads):
    def forward(self, x):
        raise KeyError("here")


@pytest.mark.parametrize(
    ("model", "batch", "memory", "error", "message"),
    [
        (3, rows(), None, TypeError, "model must be a torch.nn.Module, got int"),
        (mlp(), None, None, TypeError, "example must be a training batch"),
        (mlp(), {"y": rows()}, None, TypeError, "must have the arguments of Sequential"),
        (mlp(), torch.ones(0, WIDTH), None, ValueError, "of one row or more"),
        (mlp(), rows(), "8 gigs", ValueError, "memory must be a size"),
        (mlp(), rows(), "least", ValueError, "memory must be what there is"),
        (mlp().requires_grad_(False), rows(), None, ValueError, "depends on its trained parameters"),
        (Reads(), rows(), None, ValueError, "reads values of a tensor"),
        (Fails(), rows(), None, ValueError, "A step of Fails on this batch cannot be simulated: KeyError: 'here'"),
    ],
)
def test_what_is_refused(model, batch, memory, error, message):
    with pytest.raises(error, match=message):
        explain_oom(model, batch, memory)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_parts_of_a_batch_with_batch_norms_are_not_called_exact(is_frozen):
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.BatchNorm1d(INNER), nn.Tanh())
    model[1].train(not is_frozen)
    (way,) = (way for way in explain_oom(model, rows()).ways if way.name.endswith("parts of the batch"))
    assert way.noise == (0 if is_frozen else None)
    assert ("exact where" in way.note, "batch norms" in way.note) == (is_frozen, not is_frozen)


def test_of_a_function_the_peak_is_explained_alone():
    model, batch = mlp(), rows()
    found = explain_oom(model, lambda: model(batch).square().sum(), "1GB")
    assert found.ways == []
    assert [note.split(":")[0].split(".")[0] for note in found.notes] == [
        "By simulation the step fits",
        "A function as the batch hides what it runs on, so no ways out were tried",
    ]
    rmm_linear.convert(model)
    with pytest.raises(ValueError, match="the batch may be no function"):
        explain_oom(model, lambda: model(batch))

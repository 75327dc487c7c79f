"""Functions that are given a model leave it as it is: values, gradients, random numbers, hooks, modes and objects."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import rmm_linear
from rmm_linear import memory, planning, variance

WIDTH, ROWS = 8, 16


NORMS = (parametrizations.spectral_norm, spectral_norm, parametrizations.weight_norm, weight_norm)


class Gated(nn.Module):
    """A gated MLP, whose children are run to find out that it is one."""

    def __init__(self, norm):
        super().__init__()
        self.gate, self.up = norm(nn.Linear(WIDTH, 2 * WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)
        self.act, self.down = nn.SiLU(), norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.head.weight = self.embed.weight
        self.normed = nn.Sequential(*(norm(nn.Linear(WIDTH, WIDTH)) for norm in NORMS))
        self.gated, self.plain = nn.Sequential(*map(Gated, NORMS)), nn.Linear(WIDTH, WIDTH)
        self.frozen, self.act, self.dropout = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)
        self.lazy, self.layer_norm = nn.LazyLinear(WIDTH), nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.frozen.requires_grad_(False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels):
        x = self.layer_norm(self.embed(input_ids))
        x = self.lazy(self.batch_norm(self.normed(x).transpose(1, 2)).transpose(1, 2))
        x = self.dropout(self.act(self.plain(x + self.gated(x))))
        logits = self.head(self.frozen(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


BATCH = {"input_ids": torch.arange(2 * ROWS).view(2, ROWS), "labels": torch.arange(2 * ROWS).view(2, ROWS) % 5}
HOOKS = [name for name in vars(nn.Linear(1, 1)) if "_hooks" in name]
CONFIG = {"min_rows": 1, "ratio": 0.5}


def run(model):
    """Two steps: the second one sees what the first has changed."""
    return torch.stack([model(**BATCH)["loss"] for _ in range(2)])


def converted(call):
    """A function of a converted model, and back."""

    def convert_call_revert(model, folder):
        rmm_linear.convert(model, **CONFIG)
        try:
            return call(model, folder)
        finally:
            rmm_linear.revert(model)

    return convert_call_revert


FUNCTIONS = {
    "dry_run": lambda model, _: rmm_linear.convert(model, dry_run=True, **CONFIG),
    "dry_run on an example": lambda model, _: rmm_linear.convert(model, dry_run=True, example=BATCH, **CONFIG),
    "convert and revert": converted(lambda model, _: None),
    "convert on an example": lambda model, _: (
        rmm_linear.convert(model, example=BATCH, **CONFIG),
        rmm_linear.revert(model),
    ),
    "sketch_state": converted(
        lambda model, folder: (
            rmm_linear.load_sketch_state(model, rmm_linear.sketch_state(model), rmm_linear.sketch_tensors(model)),
            rmm_linear.save_sketch_state(model, folder / "sketches"),
        )
    ),
    "explain": lambda model, _: memory.explain(model, BATCH, **CONFIG),
    "fit": lambda model, _: (rmm_linear.fit(model, BATCH, 0.95), rmm_linear.revert(model)),
    "max_batch": lambda model, _: rmm_linear.max_batch(model, BATCH, 70_000, allow=("recompute",)),
    "gradient_noise": lambda model, _: variance.gradient_noise(model, BATCH, rmm_linear.RMMConfig(**CONFIG), draws=1),
    "gradient_noise of a converted model": converted(lambda model, _: variance.gradient_noise(model, BATCH, draws=1)),
    "simulate": lambda model, _: planning.simulate(model, BATCH),
    "explain_oom": lambda model, _: planning.explain_oom(model, BATCH, 1),
    "measure": lambda model, _: planning.measure(model, BATCH),
    "workspace": lambda model, _: planning.workspace(model, BATCH),
    "plan_blocks": lambda model, _: planning.plan_blocks(model, BATCH, 0.9),
    "plan_graph": lambda model, _: planning.plan_graph(model, BATCH, 0.95),
    "order": lambda model, _: planning.order(model, BATCH),
}


def made():
    torch.manual_seed(0)
    model = Model().train()
    model.dropout.eval()
    run(model).sum().backward()  # materializes the lazy layer, and leaves gradients
    model.register_forward_hook(lambda *_: None)
    model.plain.register_forward_pre_hook(lambda *_: None)
    return model


def state_of(model):
    """What belongs to a model and to the generators: values, and the objects that have them."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {name: value.detach().clone() for name, value in tensors.items()}
    values |= {f"{name}.grad": p.grad.clone() for name, p in tensors.items() if p.grad is not None}
    numbers = np.random.get_state()[1]  # noqa: NPY002 others draw from the global generator
    values |= {"rng": torch.get_rng_state(), "numpy": torch.from_numpy(numbers.astype(np.int64))}
    objects = {name: (id(p), id(p.grad), p.requires_grad, id(p.grad_fn)) for name, p in tensors.items()}
    modules = {
        name: (id(m), type(m), m.training, list(vars(m)), [list(vars(m)[hooks].values()) for hooks in HOOKS])
        for name, m in model.named_modules()
    }
    return values, objects, modules, random.getstate()


def assert_same(found, expected):
    assert found[0].keys() == expected[0].keys()
    changed = [name for name, value in found[0].items() if not torch.equal(value, expected[0][name])]
    assert changed == []
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        assert {name: one[name] for name in one if one[name] != other.get(name)} == {}
    assert found[3] == expected[3]


def assert_runs_as(expected, model):
    assert torch.equal(run(model), run(expected))
    assert all(map(torch.equal, model.buffers(), expected.buffers()))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_leaves_the_model_as_it_is(function, tmp_path):
    model = made()
    before = state_of(model)
    FUNCTIONS[function](model, tmp_path)
    assert_same(state_of(model), before)
    assert_runs_as(made(), model)


def test_convert_changes_classes_alone():
    model = made()
    before = state_of(model)
    rmm_linear.convert(model, **CONFIG)
    found = state_of(model)
    assert_same((*found[:2], {}, found[3]), before)
    assert all(found[2][name][0] == one[0] and found[2][name][2] == one[2] for name, one in before[2].items())
    assert_runs_as(made(), model)

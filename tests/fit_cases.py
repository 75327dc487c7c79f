"""Models for the tests that try to break fits: small, with what may go wrong in them; and all that a step shows."""

import copy
import random

import torch
from helpers import tiny_model, token_ids
from torch import nn

from rmm_linear.fitting.settings import Conversions
from rmm_linear.planning.blocks.find import find_blocks, find_inner
from rmm_linear.planning.blocks.plan import BlockPlan, PlannedBlock
from rmm_linear.planning.step.step import loss_of

WIDTH = 16


class Normed(nn.Module):
    """A residual block with running statistics, dropout and an activation."""

    def __init__(self, width=WIDTH, dropout=0.2):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.inside = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.after = nn.Sequential(nn.LayerNorm(width), nn.Dropout(dropout))

    def forward(self, x):
        return x + self.after(self.inside(self.norm(x)))


def stack(blocks=3, width=WIDTH, dropout=0.2):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(8, width), *(Normed(width, dropout) for _ in range(blocks)), nn.Linear(width, 2))


def rows(count=64):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(4))


def tokens(architecture, batch=4, length=20):
    ids = token_ids(batch, length)
    return {"input_ids": ids, "labels": ids if architecture in ("llama", "gpt2") else ids[:, 0] % 2}


def network(kind):
    """A model and a batch: a stack, or a model of transformers by its architecture."""
    if kind == "stack":
        return stack().train(), rows()
    model = tiny_model(kind).train()
    if kind == "roberta":
        model.config.problem_type = "single_label_classification"  # which its first forward pass would set
    if kind == "llama":
        model.config.use_cache = False
    return model, tokens(kind)


def planned(model, choice, setting="", folder=None):
    """Give every block that can have it one choice, as a fit does."""
    names = find_blocks(model)
    conversions = Conversions(model, names)
    chosen = []
    for name in names:
        inner = find_inner(model, name) if choice == "nested" else ()
        can = {
            "nested": bool(inner),
            "convert": setting in [each.name for each in conversions.settings(name, ("sketch", "pack"))],
        }
        does = choice if can.get(choice, True) else "keep"
        chosen.append(PlannedBlock(name, does, inner=inner, setting=setting if does == "convert" else ""))
    plan = BlockPlan(chosen, config=conversions.configure(chosen), folder=folder)
    plan.apply(model)
    return plan


def step(model, example, seed=9):
    """Loss, outputs, gradients, buffers and the random numbers that come next, of one step from given numbers."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(**example) if isinstance(example, dict) else model(example)
    loss = loss_of(output)
    loss.backward()
    found = {"loss": loss, "output": output["logits"] if isinstance(example, dict) else output}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return {name: value.detach().clone() for name, value in found.items()} | {"next": torch.rand(3)}


def differing(found, expected):
    """Names of what is not the same to the bit."""
    missing = found.keys() ^ expected.keys()
    return [
        *missing,
        *(name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])),
    ]


def structure(model):
    """Classes, modes, what trains, hooks, instance attributes and the configuration: all of a model but its tensors."""
    found = {}
    for name, module in model.named_modules():
        hooks = {
            key: len(value) for key, value in vars(module).items() if "_hooks" in key and hasattr(value, "__len__")
        }
        found[name] = (type(module), module.training, hooks, sorted(vars(module)), list(module._parameters))
    trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    config = getattr(model, "config", None)
    return found, trains, None if config is None else (config.to_dict(), config._attn_implementation)


def snapshot(model):
    """All that a fit must leave alone, the random numbers too."""
    tensors = {name: value.clone() for name, value in model.state_dict(keep_vars=True).items()}
    tensors |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    tensors["torch"] = torch.get_rng_state()
    identities = [(id(p), p.data_ptr(), id(p.grad)) for p in model.parameters()] + [id(b) for b in model.buffers()]
    return {name: value.detach() for name, value in tensors.items()}, structure(model), identities, random.getstate()


def assert_untouched(model, before):
    after = snapshot(model)
    assert differing(after[0], before[0]) == []
    assert after[1] == before[1]
    assert after[2] == before[2]
    assert after[3] == before[3]


def twins(model):
    return model, copy.deepcopy(model)

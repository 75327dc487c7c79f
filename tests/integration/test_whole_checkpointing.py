"""All operations under activation checkpointing: losses of the exact model, unbiased gradients, fewer bytes.

Every draw has the random numbers of one exact step, dropout's among them, and stand-ins of its own (``salt``). So the
mean gradient is that of the exact step if a recomputation repeats the dropout masks, and reads no stand-in with the
random numbers of another.
"""

import functools

import pytest
import torch
from cases import WHOLE_BODY
from helpers import batch_of, enable_checkpointing, gradients, tiny_model
from statistical import assert_unbiased
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear import convert
from rmm_linear.memory import track_saved

SUM_OF_ROUNDING = 2**-23 * 64  # of a float32 loss that is summed in another order


def selective(choose):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if choose(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def ours(op):
    return op.namespace == "rmm_linear"


MODES = {
    "plain": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "stand-ins saved": {"use_reentrant": False, "context_fn": selective(ours)},
    "products saved": {"use_reentrant": False, "context_fn": selective(PRODUCTS.__contains__)},
}
SHORT = [("roberta", "reentrant"), ("roberta", "products saved"), ("llama", "reentrant")]
SHORT += [("llama", "non-reentrant"), ("gpt2", "stand-ins saved")]
CASES = [
    pytest.param(architecture, mode, marks=[] if (architecture, mode) in SHORT else pytest.mark.stack)
    for architecture in ("roberta", "gpt2", "llama", "vit", "t5")
    for mode in MODES
]
cases = pytest.mark.parametrize(("architecture", "mode"), CASES)


def checkpointing(model, options):
    if options is not None:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(options)
        if options["use_reentrant"] and hasattr(model.get_input_embeddings(), "weight"):
            model.enable_input_require_grads()


def made(architecture, *, whole, dropout=0.2, options=None):
    model = tiny_model(architecture, dropout=dropout).train()
    model.config.use_cache = False
    report = convert(model, **WHOLE_BODY) if whole else None
    if whole and model.get_output_embeddings() is not None:
        model.get_output_embeddings().rmm_chunk = 7
    checkpointing(model, options)
    return model, report


def inputs_of(architecture):
    """Padding has no label."""
    inputs = batch_of(architecture)
    if architecture in ("gpt2", "llama"):
        inputs["labels"] = inputs["input_ids"]
        if "attention_mask" in inputs:
            inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    elif architecture != "t5":
        inputs["labels"] = torch.tensor([0, 1, 1, 0])
    return inputs


def step(model, inputs, seed=5):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


@cases
def test_losses_are_the_exact_models_and_gradients_unbiased(architecture, mode):
    """Attention's dropout leaves an output that is off by rounding, and so the loss."""
    inputs = inputs_of(architecture)
    expected, exact = step(made(architecture, whole=False)[0], inputs)
    model, report = made(architecture, whole=True, options=MODES[mode])
    losses = []

    def draw(number):
        report.context.salt = number
        loss, found = step(model, inputs)
        losses.append(loss)
        assert found.keys() == exact.keys()
        return found

    assert_unbiased(draw, exact, draws=16, widest=0.05)
    for loss in losses:
        assert abs(loss - expected) < SUM_OF_ROUNDING * abs(expected)


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    "architecture",
    ["roberta", pytest.param("llama", marks=pytest.mark.stack), pytest.param("t5", marks=pytest.mark.stack)],
)
def test_without_preserved_generators_gradients_are_unbiased(architecture, mode):
    """And there is no dropout then, whose masks would not repeat in the exact model either."""
    inputs = inputs_of(architecture)
    expected, exact = step(made(architecture, whole=False, dropout=0.0)[0], inputs)
    model, _ = made(architecture, whole=True, dropout=0.0)
    enable_checkpointing(model, mode == "reentrant", preserve=False)
    losses = []

    def draw(number):
        loss, found = step(model, inputs, seed=number)
        losses.append(loss)
        return found

    assert_unbiased(draw, exact, draws=16, widest=0.05)
    bit = 0 if architecture == "roberta" else SUM_OF_ROUNDING * abs(expected)  # of a loss in chunks
    assert all(abs(loss - expected) <= bit for loss in losses)


class Block(nn.Module):
    """What a block has: norm, linear, activation, dropout, linear and a residual addition."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU()
        self.dropout, self.down = nn.Dropout(0.3), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.dropout(self.act(self.up(self.norm(x)))))


class Blocks(nn.Module):
    def __init__(self, options):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.options = options

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.options is None else checkpoint(block, x, **self.options)
        return x


def summed(model, order):
    """Gradients of the squares of three inputs' outputs, passes made in an order: b takes the oldest, B the newest."""
    model.zero_grad()
    generator, waiting, given = torch.Generator().manual_seed(3), [], []
    for action in order:
        if action == "f":
            x = torch.randn(4, 10, 16, generator=generator).requires_grad_()
            given.append(x)
            torch.manual_seed(len(given))  # a converted model draws one number more after every pass
            waiting.append(model(x).square().sum())
        else:
            waiting.pop(0 if action == "b" else -1).backward()
    return {**gradients(model), **{str(number): x.grad for number, x in enumerate(given)}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "order", ["ffBfbb", *(pytest.param(order, marks=pytest.mark.stack) for order in ("fbfb", "ffbb", "ffBB"))]
)
def test_forward_and_backward_passes_in_any_order(order, mode):
    """A recomputation has the masks of its own forward pass, and what it stores it reads itself."""
    exact = summed(Blocks(None), order)
    model = Blocks(MODES[mode])
    report = convert(model, **WHOLE_BODY)
    assert {entry.operation for entry in report.packed.values()} == {"norm", "activation", "dropout"}

    def draw(number):
        report.context.salt = number
        return summed(model, order)

    assert_unbiased(draw, exact, draws=12, widest=0.03)


@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_fewer_bytes_are_saved_than_by_the_exact_model(architecture, mode):
    """Between checkpoints too: what is left there are the norm and the head, or the loss in chunks."""
    saved = []
    for whole in (False, True):
        model, _ = made(architecture, whole=whole, options=MODES[mode])
        with track_saved(model) as kept:
            loss = model(**inputs_of(architecture)).loss
        saved.append(kept.total)
        loss.backward()
    # Embeddings, inputs of blocks and gradients of the head's weight are there in both.
    assert saved[1] < (0.5 if mode == "plain" else 0.95) * saved[0], saved

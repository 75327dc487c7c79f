"""Activation checkpointing and saved-tensor hooks over architectures: losses of the exact model, gradients unbiased.

Every draw has the random numbers of one exact step, dropout's among them, and compressed activations of its own
(``salt``). So the mean gradient is that of the exact step if a recomputation repeats the dropout masks, and reads
nothing with the random numbers of another.
"""

import contextlib
import warnings

import helpers
import pytest
import torch
import transformers
from cases import EXACT, LINEAR, PACKED, WHOLE_BODY, architectures, checkpoints
from helpers import (
    batch_of,
    checkpointed,
    enable_checkpointing,
    gradients,
    labelled,
    loss_of,
    selective,
    six_features,
    tiny_model,
    token_ids,
)
from packaging.version import parse as version
from statistical import assert_unbiased
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import convert
from rmm_linear.memory import track_saved
from rmm_linear.memory.peak import LiveTensors, Peak

SUM_OF_ROUNDING = 2**-23 * 64  # of a float32 loss that is summed in another order
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def ours(op):
    return op.namespace == "rmm_linear"


MODES = {
    "plain": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "ours saved": {"use_reentrant": False, "context_fn": selective(ours)},
    "products saved": {"use_reentrant": False, "context_fn": selective(PRODUCTS.__contains__)},
}
SHORT = [("roberta", "reentrant"), ("roberta", "products saved"), ("llama", "reentrant"), ("llama", "non-reentrant")]
SHORT += [("gpt2", "ours saved"), ("t5", "non-reentrant"), ("vit", "reentrant")]
CASES = [
    pytest.param(architecture, mode, marks=[] if (architecture, mode) in SHORT else pytest.mark.stack)
    for architecture in ("roberta", "gpt2", "llama", "vit", "t5")
    for mode in MODES
]


def made(architecture, *, whole=False, dropout=0.2, options=None):
    """Without a cache, as under checkpointing: with one, keys are laid out and sums are made in another order."""
    model = tiny_model(architecture, dropout=dropout).train()
    model.config.use_cache = False
    report = convert(model, **WHOLE_BODY) if whole else None
    if whole and model.get_output_embeddings() is not None:
        model.get_output_embeddings().rmm_chunk = 7
    if options is not None:
        enable_checkpointing(model, options["use_reentrant"], **{k: v for k, v in options.items() if k == "context_fn"})
    return model, report


def step(model, inputs, seed=5):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("architecture", "mode"), CASES)
def test_losses_are_the_exact_models_and_gradients_unbiased(architecture, mode):
    """Attention's dropout leaves an output that is off by rounding, and so the loss."""
    inputs = labelled(architecture)
    expected, exact = step(made(architecture)[0], inputs)
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


@checkpoints
@pytest.mark.parametrize(
    "architecture", ["roberta", *(pytest.param(n, marks=pytest.mark.stack) for n in ("llama", "t5"))]
)
def test_without_preserved_generators_gradients_are_unbiased(architecture, reentrant):
    """And there is no dropout then, whose masks would not repeat in the exact model either."""
    inputs = labelled(architecture)
    expected, exact = step(made(architecture, dropout=0.0)[0], inputs)
    model, _ = made(architecture, whole=True, dropout=0.0)
    enable_checkpointing(model, reentrant, preserve=False)
    losses = []

    def draw(number):
        loss, found = step(model, inputs, seed=number)
        losses.append(loss)
        return found

    assert_unbiased(draw, exact, draws=16, widest=0.05)
    bit = 0 if architecture == "roberta" else SUM_OF_ROUNDING * abs(expected)  # of a loss in chunks
    assert all(abs(loss - expected) <= bit for loss in losses)


@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_both_names_of_transformers_checkpointing(name):
    model = tiny_model("roberta").train()
    convert(model, **EXACT)
    if not hasattr(model, name):
        assert name.startswith("activation"), "the older name is gone: remove it here"
        assert version(transformers.__version__) < version("5.23")
        pytest.skip(f"transformers {transformers.__version__} has the older name alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older name
        getattr(model, name)({"use_reentrant": False})
    recomputed = []
    model.roberta.encoder.layer[0].output.dense.register_forward_hook(lambda *_: recomputed.append(1))
    model(input_ids=token_ids(), labels=token_ids()[:, 0] % 2).loss.backward()
    assert len(recomputed) == 2


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


# Selective checkpointing, as transformers hands a policy on; with padding, and with siblings that share a sketch


@architectures
def test_a_policy_that_saves_sketches_has_the_gradients_of_a_step_without_checkpointing(architecture):
    found = []
    for options in (None, MODES["ours saved"]):
        model, _ = made(architecture, dropout=0.1, options=options)
        convert(model, kind="countsketch", ratio=0.5, min_rows=8, bits=4, **PACKED)
        found.append(helpers.step(model, architecture, seed=3)[1])
    for name, gradient in found[0].items():
        if "EncDecAttention" not in name:  # of the encoder's output, every checkpoint has a sketch of its own
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


POLICIES = {"products": PRODUCTS.__contains__, "all": lambda op: True, "all but the sketches": lambda op: not ours(op)}


@pytest.mark.diagonal
@pytest.mark.parametrize("fields", [{}, {"ratio": 0.99}], ids=["default", "every row"])
@pytest.mark.parametrize("choose", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("architecture", ["roberta", "llama"])
def test_whatever_is_saved_what_is_exact_stays_so(architecture, choose, fields):
    """A recomputation runs the operators that the forward pass ran.

    With a row for every token that counts, in the input's own dtype, all gradients are exact.
    """
    plain = tiny_model(architecture, dropout=0.0, width=64).train()
    exact = helpers.step(plain, architecture)[1]
    model = tiny_model(architecture, dropout=0.0, width=64).train()
    sketched = {f"{name}.weight" for name in convert(model, min_rows=8, **LINEAR, **fields).converted}
    enable_checkpointing(model, False, context_fn=selective(choose))
    for _ in range(6):
        found = helpers.step(model, architecture)[1]
        for name in found.keys() - (sketched if not fields else set()):
            torch.testing.assert_close(found[name], exact[name], rtol=1e-4, atol=1e-6)


# Saved-tensor hooks


@architectures
def test_saved_tensors_on_the_cpu_or_through_other_hooks_change_nothing(architecture):
    """Z, the seed and the mask are saved tensors like others, so hooks move all of them.

    The loss is the same to the bit. What comes back for the backward pass may be laid out otherwise, so that products
    of it add in another order: that is rounding, where another seed would be seen in the first digit.
    """
    model, _ = made(architecture, dropout=0.0)
    convert(model, mask_padding=False, bits=4, **WHOLE_BODY)
    helpers.step(model, architecture, seed=5)  # shows which layers free nothing
    copies = []

    def pack(tensor):
        copies.append(tensor.dtype)
        return tensor.detach().clone(), tensor.device

    expected = helpers.step(model, architecture, seed=5)
    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])),
    ):
        with hooks:
            loss, found = helpers.step(model, architecture, seed=5)
        assert torch.equal(loss, expected[0])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6)
    assert {torch.uint8, torch.int64} <= set(copies)  # codes and seeds


# Bytes: the tensors that live, as every operator was watched, against what the saved-tensor hooks and the formulas say


@pytest.mark.diagonal
@pytest.mark.parametrize("settings", [None, WHOLE_BODY], ids=["exact", "whole"])
@architectures
def test_nothing_but_what_the_ledger_counts_lives_after_a_forward_pass(architecture, settings):
    """Nothing is held past the hooks, in nodes, closures or the scope."""
    model, _ = made(architecture, dropout=0.1)
    if settings:
        convert(model, bits=4, **settings)
    batch = batch_of(architecture)
    loss_of(model, architecture, batch)  # shows which layers free nothing
    with LiveTensors(Peak()) as live:
        loss = loss_of(model, architecture, batch)
        alive = live.now
    given = {tensor.untyped_storage().data_ptr() for tensor in batch.values()}
    with track_saved(model) as kept:
        again = loss_of(model, architecture, batch)
    counted = sum(entry.bytes for (_, address), entry in kept.storages.items() if address not in given)
    assert again.requires_grad
    assert alive == counted + loss.nbytes > loss.nbytes


FORMS = {
    "plain": {},
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "save_on_cpu": {},
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("form", FORMS)
def test_recomputed_sketches_take_the_bytes_of_their_recipes(form, bits, monkeypatch):
    """20 rows instead of 10: what that adds after the forward pass, and when the backward pass comes to the block.

    A checkpoint keeps the sketch of the head alone, and that of the block's two layers while the block is recomputed.
    """
    x = six_features()

    def measured(ratio):
        model = checkpointed(**FORMS[form])
        convert(model, kind="countsketch", ratio=ratio, bits=bits, min_rows=1, **PACKED)
        in_block = []
        monkeypatch.setattr(
            type(model.block[2]),
            "_on_backward",
            lambda layer, call, known, y, mask, **how: in_block.append((layer.rmm_index, live.now)),
        )
        with LiveTensors(Peak()) as live:
            hooks = torch.autograd.graph.save_on_cpu() if form == "save_on_cpu" else contextlib.nullcontext()
            with hooks:
                loss = model(x).sum()
            forward = live.now
            loss.backward()
        assert [index for index, _ in in_block] == [2, 1, 0]
        recipes = [layer.rmm_config.spec(len(x), layer.in_features, 4) for layer in (*model.block[::2], model.head)]
        sizes = [recipe.bytes(len(x), features, 4) for recipe, features in zip(recipes, (6, 8, 6), strict=True)]
        return sizes, forward, in_block[1][1]

    (few, forward, block), (many, more_forward, more_block) = measured(0.25), measured(0.5)
    first, second, head = (more - less for more, less in zip(many, few, strict=True))
    assert (first, second, head) == ((240, 320, 240) if bits is None else (40, 50, 40))
    assert more_forward - forward == (head if form.endswith("reentrant") else first + second + head)
    assert more_block - block == first + second

"""Activation checkpointing: seeds and dropout repeat in the recomputation, and gradients stay unbiased."""

import warnings

import pytest
import torch
import transformers
from cases import CONFIG, EXACT, ROUGH, checkpoints, preserve
from helpers import checkpointed, enable_checkpointing, gradients, seeds_of, six_features, tiny_model, token_ids
from packaging.version import parse as version
from statistical import assert_unbiased
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMLinear, convert
from rmm_linear.context.surroundings import in_backward

# Invisible to everything else that is random


def states_after_forward(model):
    x, states = six_features(), []
    for grad in (True, False):
        torch.manual_seed(2)
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reentrant checkpoints warn when no input needs a gradient
            model(x)
        states.append(torch.get_rng_state())
    return states


@preserve
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_generator_moves_alike_with_and_without_gradients(reentrant, preserve):
    model = checkpointed(use_reentrant=reentrant, preserve_rng_state=preserve)
    convert(model, **ROUGH)
    with_grad, without = states_after_forward(model)
    assert torch.equal(with_grad, without)
    plain = checkpointed()
    convert(plain, **ROUGH)
    assert torch.equal(states_after_forward(plain)[0], with_grad)


@checkpoints
@preserve
def test_dropout_after_and_inside_a_checkpoint_is_that_of_the_exact_model(reentrant, preserve):
    outputs = []
    for conversion in (None, ROUGH):
        model = checkpointed(use_reentrant=reentrant, preserve_rng_state=preserve)
        if conversion:
            convert(model, **conversion)
        torch.manual_seed(2)
        outputs.append(model(six_features()))
    assert torch.equal(*outputs)


def dropout_masks(model, run):
    """The zero patterns of the dropout inside the checkpoint, of the forward pass and of the recomputation."""
    masks = []
    handle = model.block[1].register_forward_hook(lambda module, args, output: masks.append(output == 0))
    run()
    handle.remove()
    return masks


@checkpoints
def test_recomputation_repeats_the_dropout_masks(reentrant):
    """Drawing seeds only when grad mode is on would shift the masks of the recomputation."""
    model = checkpointed(use_reentrant=reentrant)
    convert(model, **ROUGH)
    torch.manual_seed(2)
    masks = dropout_masks(model, lambda: model(six_features()).sum().backward())
    assert len(masks) == 2
    assert torch.equal(*masks)


@checkpoints
def test_recomputation_after_an_eval_pass_repeats_the_dropout_masks(reentrant):
    """As in self-distillation: a forward pass in eval mode lies between forward and backward."""
    model = checkpointed(use_reentrant=reentrant)
    convert(model, **ROUGH)

    def run():
        loss = model(six_features()).sum()
        model.eval()
        with torch.no_grad():
            model(six_features())
        model.train()
        loss.backward()

    torch.manual_seed(2)
    masks = [mask for mask in dropout_masks(model, run) if mask.any()]  # eval mode drops nothing
    assert len(masks) == 2
    assert torch.equal(*masks)


@checkpoints
def test_recomputation_repeats_the_dropout_masks_of_layers_by_themselves(reentrant):
    model = checkpointed(use_reentrant=reentrant)
    for index in (0, 2):
        model.block[index] = RMMLinear.from_linear(model.block[index], CONFIG)
    torch.manual_seed(2)
    masks = dropout_masks(model, lambda: model(six_features()).sum().backward())
    assert torch.equal(*masks)


@checkpoints
def test_a_part_that_is_checkpointed_after_a_step_of_the_whole_repeats_its_masks(reentrant):
    """A loop of one's own over a model's blocks, after the model was called once."""
    model = checkpointed()
    convert(model, **ROUGH)
    model(six_features()).sum().backward()
    torch.manual_seed(2)
    masks = dropout_masks(
        model, lambda: checkpoint(model.block, six_features(), use_reentrant=reentrant).sum().backward()
    )
    assert len(masks) == 2
    assert torch.equal(*masks)


class Inner(torch.nn.Module):
    """Opens the step, as it takes a mask, and recomputes dropout between two linear layers."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 6))
        self.reentrant = reentrant

    def forward(self, x, attention_mask=None):
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@checkpoints
def test_a_layer_outside_the_step_leaves_the_recomputation_of_those_inside_alone(reentrant):
    """As in a wrapper that calls the inner model and then a head of its own."""
    model = torch.nn.Sequential(Inner(reentrant), torch.nn.Linear(6, 2))
    convert(model, **ROUGH)
    masks = []
    model[0].block[1].register_forward_hook(lambda module, args, output: masks.append(output == 0))
    torch.manual_seed(2)
    model[1](model[0](six_features())).sum().backward()
    assert len(masks) == 2
    assert torch.equal(*masks)


@checkpoints
def test_every_recomputation_of_the_same_tensor_has_its_own_sketch(reentrant):
    model = torch.nn.Sequential(torch.nn.Linear(6, 4))
    convert(model, **ROUGH)
    x, found = six_features(), []
    for _ in range(3):
        model.zero_grad()
        checkpoint(model[0], x, use_reentrant=reentrant).square().sum().backward()
        found.append(model[0].weight.grad.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


class Outer(torch.nn.Module):
    """Recomputes a module that takes a mask, and so has hooks."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = Inner(None)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@checkpoints
def test_an_interrupted_recomputation_is_forgotten(reentrant):
    model = Outer(reentrant)
    convert(model, **ROUGH)

    def interrupt(*_):
        if in_backward():
            raise KeyboardInterrupt

    handle = model.inner.block[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(six_features()).sum().backward()
    handle.remove()
    torch.manual_seed(2)
    first = seeds_of(lambda: [model(six_features()).sum().backward() for _ in range(2)])
    torch.manual_seed(2)
    assert seeds_of(lambda: [model(six_features()).sum().backward() for _ in range(2)]) == first


def test_the_generator_is_left_after_backward_where_forward_left_it():
    model = checkpointed(use_reentrant=False)
    convert(model, **ROUGH)
    loss = model(six_features()).sum()
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


# Unbiased under checkpointing


def gradient(model):
    """Of the first checkpointed weight."""
    model.zero_grad()
    model(six_features()).square().sum().backward()
    return model.block[0].weight.grad


@checkpoints
@preserve
def test_gradients_are_unbiased_under_checkpointing(reentrant, preserve):
    """Z of one S with Y of another is noise of mean 0, and 10 errors away."""
    torch.manual_seed(4)
    model = checkpointed(use_reentrant=reentrant, preserve_rng_state=preserve, dropout=0.0)
    exact = gradient(model)
    convert(model, **ROUGH)
    assert_unbiased(lambda _: gradient(model), exact, draws=150, widest=0.1)


@preserve
@checkpoints
def test_layers_by_themselves_are_unbiased_under_checkpointing(reentrant, preserve):
    model = checkpointed(use_reentrant=reentrant, preserve_rng_state=preserve, dropout=0.0)
    exact = gradient(model)
    model.block[0] = RMMLinear.from_linear(model.block[0], CONFIG)
    torch.manual_seed(4)
    assert_unbiased(lambda _: gradient(model), exact, draws=150, widest=0.1)


@checkpoints
@pytest.mark.parametrize("name", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_both_names_of_transformers_checkpointing(name, reentrant):
    """Same loss and same gradients as without it, where they are exact: sketched layers at ratio 1, dropout on."""
    ids, results = token_ids(), []
    for enable in (False, True):
        model = tiny_model("roberta").train()
        convert(model, **EXACT)
        if enable:
            if not hasattr(model, name):
                assert name.startswith("activation"), "the older name is gone: remove it here"
                assert version(transformers.__version__) < version("5.23")
                pytest.skip(f"transformers {transformers.__version__} has the older name alone")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # the older name
                getattr(model, name)({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        torch.manual_seed(5)
        loss = model(input_ids=ids, labels=ids[:, 0] % 2).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (loss, plain), (checkpointed_loss, checkpointed) = results
    assert torch.equal(loss, checkpointed_loss)
    for key in plain:
        assert torch.allclose(plain[key], checkpointed[key], rtol=1e-4, atol=1e-7), key


@checkpoints
def test_transformers_checkpointing_leaves_the_exact_gradients_exact(reentrant):
    """Sketched and checkpointed against sketched: all but the sketched weights, with dropout."""
    ids, results = token_ids(), []
    for enable in (False, True):
        model = tiny_model("roberta").train()
        report = convert(model, **ROUGH)
        if enable:
            enable_checkpointing(model, reentrant)
        torch.manual_seed(5)
        model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
        results.append(gradients(model))
    sketched = {f"{name}.weight" for name in report.converted}
    for key in results[0].keys() - sketched:
        assert torch.allclose(results[0][key], results[1][key], rtol=1e-4, atol=1e-7), key

"""Activation checkpointing: random numbers repeat in the recomputation, and a sketch is read with the seed it has.

That a checkpoint changes nothing of one module is in contracts/test_modules.py.
"""

import warnings

import pytest
import torch
from cases import CONFIG, ROUGH, checkpoints, preserve
from helpers import checkpointed, gradients, seeds_of, six_features
from torch import nn
from torch.utils.checkpoint import checkpoint

from rmm_linear import RMMConfig, RMMLinear, convert
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
def test_generator_moves_alike_with_and_without_gradients_and_in_no_backward_pass(reentrant, preserve):
    model = checkpointed(use_reentrant=reentrant, preserve_rng_state=preserve)
    convert(model, **ROUGH)
    with_grad, without = states_after_forward(model)
    assert torch.equal(with_grad, without)
    plain = checkpointed()
    convert(plain, **ROUGH)
    assert torch.equal(states_after_forward(plain)[0], with_grad)
    if preserve:
        loss = model(six_features()).sum()
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)


# Recomputations repeat the dropout masks. Each maker returns the module whose masks are looked at, and a step.


class Inner(nn.Module):
    """Opens the step, as it takes a mask, and recomputes dropout between two linear layers."""

    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 6))
        self.reentrant = reentrant

    def forward(self, x, attention_mask=None):
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def converted(reentrant):
    model = checkpointed(use_reentrant=reentrant)
    convert(model, **ROUGH)
    return model.block[1], lambda: model(six_features()).sum().backward()


def with_an_eval_pass(reentrant):
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

    return model.block[1], run


def layers_by_themselves(reentrant, config=CONFIG):
    model = checkpointed(use_reentrant=reentrant)
    for index in (0, 2):
        model.block[index] = RMMLinear.from_linear(model.block[index], config)
    return model.block[1], lambda: model(six_features()).sum().backward()


def exact_layers_by_themselves(reentrant):
    """The first pass of a reentrant checkpoint, without gradients, has taken a seed, which the second must take too."""
    return layers_by_themselves(reentrant, RMMConfig(min_rows=1))


def a_part_after_a_step_of_the_whole(reentrant):
    """A loop of one's own over a model's blocks, after the model was called once."""
    model = checkpointed()
    convert(model, **ROUGH)
    model(six_features()).sum().backward()
    return (model.block[1], lambda: checkpoint(model.block, six_features(), use_reentrant=reentrant).sum().backward())


def a_layer_outside_of_the_step(reentrant):
    """As in a wrapper that calls the inner model and then a head of its own."""
    model = nn.Sequential(Inner(reentrant), nn.Linear(6, 2))
    convert(model, **ROUGH)
    return model[0].block[1], lambda: model[1](model[0](six_features())).sum().backward()


@checkpoints
@pytest.mark.parametrize(
    "make",
    [
        *(converted, with_an_eval_pass, layers_by_themselves, exact_layers_by_themselves),
        *(a_part_after_a_step_of_the_whole, a_layer_outside_of_the_step),
    ],
)
def test_recomputations_repeat_the_dropout_masks(make, reentrant):
    """Drawing seeds only when grad mode is on would shift the masks of the recomputation."""
    dropout, run = make(reentrant)
    masks = []
    dropout.register_forward_hook(lambda module, args, output: masks.append(output == 0))
    torch.manual_seed(2)
    run()
    masks = [mask for mask in masks if mask.any()]  # eval mode drops nothing
    assert len(masks) == 2
    assert torch.equal(*masks)


@pytest.mark.parametrize("alone", [True, False], ids=["layers", "model"])
def test_a_reentrant_checkpoint_inside_of_one_that_is_not_repeats_its_dropout(alone):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.dropout, self.second = nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)

        def inner(self, x):
            return self.second(self.dropout(self.first(x)))

        def forward(self, x):
            return checkpoint(lambda x: checkpoint(self.inner, x, use_reentrant=True), x, use_reentrant=False)

    found = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = Nested().train()
        if converts and alone:
            config = RMMConfig(min_rows=1)
            model.first, model.second = (RMMLinear.from_linear(one, config) for one in (model.first, model.second))
        elif converts:
            convert(model, min_rows=1)
        torch.manual_seed(5)
        model(six_features()).square().sum().backward()
        found.append(gradients(model))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


# Sketches of a recomputation


@checkpoints
def test_every_recomputation_of_the_same_tensor_has_its_own_sketch(reentrant):
    model = nn.Sequential(nn.Linear(6, 4))
    convert(model, **ROUGH)
    x, found = six_features(), []
    for _ in range(3):
        model.zero_grad()
        checkpoint(model[0], x, use_reentrant=reentrant).square().sum().backward()
        found.append(model[0].weight.grad.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@checkpoints
def test_an_interrupted_recomputation_is_forgotten(reentrant):
    class Outer(nn.Module):
        """Recomputes a module that takes a mask, and so has hooks."""

        def __init__(self):
            super().__init__()
            self.inner = Inner(None)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Outer()
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

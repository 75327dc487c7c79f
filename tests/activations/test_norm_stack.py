"""Packed norms in checkpoints and compiled code, and where several of them read one tensor."""

import functools

import pytest
import torch
from compile_helpers import Graphs
from norm_helpers import WIDTH, Bits, batch, error, fresh, fresh_like, gradients, packed
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear.context.model_context import ModelContext


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint_the_gradient_is_one_draw_of_the_same(use_reentrant):
    """Twice the same seed by the generator: the second pass makes a copy of its own, and reads that one."""
    module, x = packed(fresh()), batch()
    module.rmm_config = Bits(8)
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(fresh_like(module), x, y)[1]
    output = checkpoint(module, x, use_reentrant=use_reentrant)
    output.backward(y)
    for one, other in zip((x.grad, module.weight.grad, module.bias.grad), expected, strict=True):
        assert error(one, other) < 0.03


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_selective_checkpoint_may_save_the_copy_or_make_another(policy):
    module, x = packed(fresh()), batch()
    module.rmm_config = Bits(8)
    y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(fresh_like(module), x, y)[1]

    def choose(context, operator, *arguments, **named):
        return policy if operator == torch.ops.rmm_linear.pack_norm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    checkpoint(lambda x: module(x * 1.0), x, use_reentrant=False, context_fn=contexts).backward(y)
    for one, other in zip((x.grad, module.weight.grad, module.bias.grad), expected, strict=True):
        assert error(one, other) < 0.03


def test_later_random_numbers_do_not_depend_on_grad_mode():
    module, x = packed(fresh()), batch()
    after = []
    for grad in (True, False):
        torch.manual_seed(3)
        with torch.set_grad_enabled(grad):
            module(x)
        after.append(torch.rand(1))
    assert torch.equal(*after)


@pytest.mark.parametrize("name", ["layer", "rms", "two dimensions"])
def test_one_graph_for_all_lengths_and_a_new_copy_in_every_step(name):
    module = packed(fresh(name))
    graphs = Graphs()
    compiled = graphs.compile(module)
    for length in (4, 6, 8):
        x = batch(name, length=length)
        y = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        found = []
        for _ in range(2):
            torch.manual_seed(7)
            output, own = gradients(compiled, x, y)
            found.append(own)
        assert torch.equal(output, module(x))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert not torch.equal(gradients(compiled, x, y)[1][0], own[0])
        torch.manual_seed(7)
        assert torch.equal(gradients(module, x, y)[1][0], own[0])
    assert len(graphs.counts) == 4  # forward and backward, of one length and of all others
    torch._dynamo.reset()


class Sum(nn.Module):
    """The sum of norms of one input, and of one norm that reads another tensor."""

    def __init__(self, *norms, other=None):
        super().__init__()
        self.norms, self.other = nn.ModuleList(norms), other

    def forward(self, x):
        total = sum(norm(x) for norm in self.norms)
        return total if self.other is None else total + self.other(x * 2)


def test_norms_that_read_the_same_input_share_one_copy():
    """As in parallel attention blocks; another input, or another eps, has a copy of its own."""
    context = ModelContext([str(number) for number in range(4)])
    norms = [packed(norm) for norm in (fresh(), fresh(), nn.LayerNorm(WIDTH, eps=1e-3), fresh())]
    for number, norm in enumerate(norms):
        norm._set_up(None, context, number)
    block = Sum(*norms[:3], other=norms[3])
    context.attach(block)
    places = []

    def keep(tensor):
        if tensor.dtype == torch.uint8:
            places.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(batch()).sum().backward()
    assert len(places) == 4
    assert places[0] == places[1]
    assert len(set(places)) == 3
    assert context.sketch_cache.groups == {(0, 1)}


def test_compilers_merge_the_copies_of_norms_that_read_the_same_input():
    first, second, x = packed(fresh()), packed(fresh()), batch()
    graphs = Graphs()
    compiled = graphs.compile(Sum(first, second))
    compiled(x).sum().backward()
    assert graphs.counts[0]["rmm_linear.pack_norm.default"] == 1
    torch._dynamo.reset()

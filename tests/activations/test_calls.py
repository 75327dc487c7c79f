"""Modules whose own code calls functions of PyTorch; gradients of some are in tests/contracts/test_modules.py."""

import json

import pytest
import torch
from statistical import assert_unbiased
from torch import nn
from torch.nn import functional as F

from rmm_linear import convert, load_sketch_state, sketch_state
from rmm_linear.activations.calls import PackedCalls, calls_of
from rmm_linear.config import OPERATIONS
from rmm_linear.memory import track_saved


class Router(nn.Module):
    """Chooses by the product with its weight, in float32."""

    def __init__(self, width=32, experts=4):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(experts, width)), nn.Linear(experts, experts)

    def forward(self, x):
        logits = F.linear(x.flatten(0, -2).type(torch.float32), self.weight.type(torch.float32))
        return self.inner(logits).softmax(-1), logits.topk(2)[1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(32, 32), Router()

    def forward(self, x):
        return self.router(self.first(x) * 2)[0]


def test_a_router_saves_codes_and_chooses_the_same():
    model, x = Model().train(), torch.randn(4, 40, 32)
    exact = model(x)
    with track_saved(model) as before:
        output = model(x)
    report = convert(model, min_rows=1)
    assert isinstance(model.router, PackedCalls)
    assert report.packed["router"].operation == "linear"
    assert torch.equal(model(x), exact)
    with track_saved(model) as after:
        again = model(x)
    assert torch.equal(output, again)
    rows = 4 * 40
    freed = before.by_module["router"] - after.by_module["router"]
    assert freed >= rows * 32 * 4 - (rows * 32 * 3 / 8 + rows + 8)


def test_the_report_says_where_all_calls_see_few_rows():
    """Until one has seen more."""
    model, x = Model().train(), torch.randn(4, 40, 32)
    report = convert(model)
    for rows, found in ((x[:1], ["router"]), (x, []), (x[:1], [])):
        model(rows).sum().backward()
        assert [*report.exact_calls] == found
        assert ("its code's calls see at most min_rows=64 rows: stays exact" in report.table()) == bool(found)
        assert report.summary().endswith("converted=2" if found else "converted=3")


def test_layers_inside_of_it_are_not_taken_for_it():
    """Excluded, they are exact."""
    model, x = Model().train(), torch.randn(4, 40, 32)
    model(x).square().sum().backward()
    wanted = model.router.inner.weight.grad.clone()
    model.zero_grad()
    convert(model, min_rows=1, exclude_modules=["inner"], operations=("linear",))
    model(x).square().sum().backward()
    assert torch.equal(model.router.inner.weight.grad, wanted)


@pytest.mark.parametrize(
    ("fields", "is_converted"),
    [({}, True), ({"target_modules": ["first"]}, False), ({"target_modules": ["router"]}, True),
     ({"exclude_modules": ["router"]}, False), ({"operations": ("norm", "activation", "dropout")}, False)],
)  # fmt: skip
def test_it_is_chosen_as_linear_layers_are(fields, is_converted, caplog):
    model = nn.Sequential(Model(), nn.GELU())
    convert(model, **fields)
    assert isinstance(model[0].router, PackedCalls) == is_converted
    assert "matches no linear layer" not in caplog.text


def test_where_nothing_is_trained_nothing_is_saved():
    model, x = Model().train(), torch.randn(4, 40, 32)
    convert(model, min_rows=1)
    model.router.weight.requires_grad_(False)
    model(x).sum().backward()
    assert model.router.weight.grad is None
    model.router.training = False
    model.router.weight.requires_grad_(True)
    model(x).sum().backward()  # in eval mode, it is exact
    assert model.router.weight.grad is not None
    assert sketch_state(model)["layers"] == ["first", "router.inner"]


def test_a_module_without_its_parameters_yet_is_not_one():
    assert calls_of(nn.LazyLinear(3), OPERATIONS) == []


class Called(nn.Module):
    """A linear layer, and what ``made`` makes of its output by functions."""

    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(32) / 8 + 1)

    def forward(self, x):
        return self.made(self.first(x))


class Activations(Called):
    def made(self, x):
        return F.gelu(x.roll(1, -1), approximate="tanh") + torch.sigmoid(x).roll(2, -1) + F.elu(x.roll(3, -1), 1.5)


class Norms(Called):
    def made(self, x):
        return F.layer_norm(x, (32,), self.weight) + F.group_norm(x.mT.flip(0), 4, self.weight).mT


class Products(Called):
    def made(self, x):
        scores = torch.baddbmm(x.mean(-1, keepdim=True), x, x.mT.flip(1), beta=0.5, alpha=0.1)
        return torch.einsum("bij,bjc->bic", scores, x) * self.weight + self.weight[0] * torch.bmm(scores, x.flip(1))


class Pools(Called):
    def made(self, x):
        return F.max_pool2d(x.unsqueeze(1), (1, 2), 1).squeeze(1) + F.relu(F.avg_pool1d(x, 3, 1, 1))[..., 1:]


class Added(Called):
    def made(self, x):
        rows, places = x.flatten(0, 1), torch.arange(160) % 5
        return torch.zeros(5, 32).index_add(0, places, rows) + torch.zeros(5, 32).index_add_(0, places, rows.flip(1))


class Arguments(Called):
    """Functions by arguments that few use; a matrix that is a view of what einsum has made, written into."""

    def act(x):
        return x * torch.sigmoid(x)

    def made(self, x):
        torch.mul(torch.sigmoid(places := x.detach(), out=places.clone()), places, out=places.clone())
        scores = torch.bmm(x, mat2=x.mT.flip(1)[..., :32])
        flat = torch.einsum("nc,ec->en", x.flatten(0, 1), self.weight[:, None] * self.first.weight)
        flat += 1
        x = torch.einsum("bnc,ec->bne", x, self.weight[:, None])  # of size 1 in the weight
        normed = torch.layer_norm(x.roll(1, -1), (32,), self.weight, None, 1e-5, True)
        return normed + scores + flat.mT.view(x.shape) + type(self).act(x.detach())


class Scalars(Called):
    """Gates of one number, and a complex weight; norms of too few elements for a code."""

    def __init__(self):
        super().__init__()
        self.gate, self.phase = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(32, 2))

    def made(self, x):
        turned = x.cos() * torch.view_as_complex(self.phase)
        few = F.layer_norm(x.reshape(4, 640, 2), (2,)) + F.group_norm(x.reshape(2560, 2, 1), 1).reshape(4, 640, 2)
        return self.gate * x.sin() + torch.tanh(self.gate) * x + turned.real + 2 * turned.imag + few.view(x.shape)


@pytest.mark.parametrize(
    "kind", [Activations, Norms, Products, Pools, Added, Arguments, Scalars], ids=lambda kind: kind.__name__
)
def test_functions(kind):
    """Outputs to the bit, exact gradients where nothing is rounded, the mean of all others; fewer bytes."""
    torch.manual_seed(1)
    model, x = kind().train(), torch.randn(4, 40, 32)
    named, y = dict(model.named_parameters()), torch.randn(model(x).shape)

    def gradients(seed=0):
        torch.manual_seed(seed)
        return dict(zip(named, torch.autograd.grad(model(x), [*named.values()], y, allow_unused=True), strict=True))

    exact, output = {name: one for name, one in gradients().items() if one is not None}, model(x)
    with track_saved(model) as before:
        model(x)
    host = nn.Sequential(model)
    context = convert(host, min_rows=1, exclude_modules=["first"]).context
    assert type(model).__mro__[1] is PackedCalls
    gradients()
    assert torch.equal(host(x), output)
    assert not context.kept_anyway
    with track_saved(model) as after:
        assert torch.equal(model(x), output)
    assert after.total < before.total - 160 * 32 * 3
    if kind in (Pools, Added):
        assert all(torch.equal(one, exact[name]) for name, one in gradients().items() if name in exact)
    else:
        assert_unbiased(gradients, exact, draws=24, widest=0.1)


def test_a_method_that_is_replaced_in_the_class_since_is_what_runs(monkeypatch):
    model, x = nn.Sequential(Pools()).train(), torch.randn(4, 40, 32)
    convert(model, min_rows=1)
    monkeypatch.setattr(Pools, "made", lambda self, x: 3 * x)
    assert torch.equal(model(x), 3 * model[0].first(x))


def test_code_without_a_source_is_named():
    space = {"F": F}
    exec("def forward(self, x):\n    return F.linear(x, self.weight)", space)
    kind = type("Made", (Router,), {"forward": space["forward"]})
    report = convert(nn.Sequential(nn.Linear(32, 32), kind()), min_rows=1)
    assert report.skipped["1"].endswith("functions of PyTorch, and cannot be changed: could not get source code")


class Kept(nn.Module):
    """The factor of one product is in memory anyway."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = nn.Linear(32, 32), nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32))

    def forward(self, x):
        x = self.first(x)
        return self.one * x + x.sin() + self.other * x.roll(1, -1)


def test_of_several_calls_those_are_exact_that_free_nothing(caplog):
    model, x = nn.Sequential(Kept()).train(), torch.randn(4, 40, 32)
    exact = torch.autograd.grad(model(x).sum(), [model[0].one, model[0].other])
    context = convert(model, min_rows=1, operations=("activation",)).context
    model(x).sum().backward()
    assert context.kept_sites == {(0, 1)}
    assert not context.kept_anyway
    one, other = torch.autograd.grad(model(x).sum(), [model[0].one, model[0].other])
    assert torch.equal(one, exact[0])
    assert not torch.equal(other, exact[1])
    again = nn.Sequential(Kept()).train()
    resumed = convert(again, min_rows=1, operations=("activation",)).context
    load_sketch_state(again, json.loads(json.dumps(sketch_state(model))))
    assert resumed.kept_sites == {(0, 1)}


def jetmoe():
    from transformers import JetMoeConfig
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    return JetMoeMoE(JetMoeConfig(**sizes))


def llama4():
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    return Llama4TextExperts(Llama4TextConfig(hidden_size=64, intermediate_size=64, num_local_experts=4))


def dbrx():
    from transformers import DbrxConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    class Routed(DbrxExperts):
        def forward(self, x):
            weights, index = x[0, :, :4].softmax(-1).topk(2)
            return super().forward(x, index, weights)

    config = DbrxConfig(ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}).ffn_config
    config.hidden_size = 64
    return Routed(config)


EXPERTS = {"jetmoe": (jetmoe, 0.3), "llama4": (llama4, 0.2), "dbrx": (dbrx, 0.4)}


@pytest.mark.parametrize("draws", [16, pytest.param(400, marks=pytest.mark.montecarlo)])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_of_a_class_of_their_own(name, draws):
    """Outputs to the bit, the share of the bytes, and the mean of the gradients."""
    make, share = EXPERTS[name]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 64), make()).train()
    for parameter in model[1].parameters():
        nn.init.normal_(parameter, 0, 0.2)
    x, named = torch.randn(1, 256, 64), dict(model[1].named_parameters())
    output = model(x)
    y = torch.randn(output.shape)

    def gradients(seed=0):
        torch.manual_seed(seed)
        return dict(zip(named, torch.autograd.grad(model(x), [*named.values()], y), strict=True))

    exact = gradients()
    with track_saved(model) as before:
        model(x)
    convert(model, min_rows=1)
    for _ in range(3):
        gradients()
    assert torch.equal(model(x), output)
    with track_saved(model) as after:
        model(x)
    assert after.total <= share * before.total
    assert_unbiased(gradients, exact, draws=draws, widest=0.1 if draws < 100 else 0.02)

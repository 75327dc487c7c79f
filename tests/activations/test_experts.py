"""Mixtures of experts: whatever implementation runs, whole models, what stays exact. See also the contracts."""

import copy
import logging
import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from helpers import gradients
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from rmm_linear import convert, revert
from rmm_linear.activations.experts import PackedExperts, gate_pairs, why_exact
from rmm_linear.config import OPERATIONS
from rmm_linear.memory import track_saved
from rmm_linear.ops.experts import decode_experts, encode_experts, experts_parts, grouped_outer, grouped_product
from rmm_linear.packing import encoded_parts
from rmm_linear.packing.stored import stored_bytes

IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]
TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 40, 32, 64, 5, 2
WIDE = {"operations": "experts", "bits": 8, "activation_bits": 8}
NEAR = 0.03  # of 8 bits: the relative deviation of one code is 0.006, and gradients have three factors or sums of them


class Host(nn.Module):
    """A model of one mixture of experts, of which one gets one token and one gets none."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        for parameter in experts.parameters():
            nn.init.normal_(parameter, 0, 0.3)

    def forward(self, x, index, weights):
        return self.experts(x, index, weights)


def host(kind=MixtralExperts, implementation="grouped_mm"):
    torch.manual_seed(0)
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), HIDDEN) | {"hidden_size": WIDTH}
    sizes |= dict.fromkeys(("num_local_experts", "n_routed_experts"), EXPERTS) | {"moe_latent_size": None}
    gate = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "swiglu_limit": 1.5, "swiglu_alpha": 1.7}
    return Host(kind(SimpleNamespace(**sizes, **gate, _experts_implementation=implementation))).train()


def given(tokens=TOKENS, dtype=torch.float32):
    """Tokens, indices, weights."""
    torch.manual_seed(1)
    place = torch.arange(tokens)
    index = torch.stack((place % 2, torch.where(place == 3, 3, 2)), 1)
    x, weights = torch.randn(tokens, WIDTH).to(dtype), torch.rand(tokens, CHOICES).to(dtype)
    return x.requires_grad_(), index, weights.requires_grad_()


def step(model, x, index, weights, seed=0):
    torch.manual_seed(seed)
    output = model(x, index, weights)
    y = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)
    leaves = {"x": x, "weights": weights, **dict(model.named_parameters())}
    leaves = {name: one for name, one in leaves.items() if one.requires_grad}
    return output.detach(), dict(zip(leaves, torch.autograd.grad(output, leaves.values(), y), strict=True))


def saved_by(model, run):
    with track_saved(model) as kept:
        output = run()
    del output
    return kept.total


def assert_near(found, expected, room=NEAR):
    for name, gradient in expected.items():
        assert found[name].dtype == gradient.dtype
        assert (found[name] - gradient).norm() <= room * gradient.norm(), name


# Implementations and gates


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        (MixtralExperts, "halves"),
        (GptOssExperts, "pairs"),
        (OpenAIPrivacyFilterExperts, "halves"),
        (DeepseekV4Experts, "halves"),
        (NemotronHExperts, "single"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_every_gate_under_every_implementation(kind, pairs, implementation):
    """Interleaved, clamped, transposed, with biases, without a gate; also in later calls, which know the order."""
    model, inputs = host(kind, implementation), given()
    output, expected = step(model, *inputs)
    convert(model, **WIDE)
    assert model.experts.rmm_pairs == pairs
    for _ in range(2):
        found = step(model, *inputs)
        assert torch.equal(found[0], output)
        assert_near(found[1], expected)
    orders = {"grouped_mm": "sorted", "batched_mm": "tokens", "eager": "other"}
    assert model.experts.rmm_orders == {implementation: "other" if pairs == "single" else orders[implementation]}
    model.eval()
    assert torch.equal(model(*inputs), output)


@pytest.mark.parametrize("kind", [MixtralExperts, GptOssExperts])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(kind, dtype):
    implementation = "eager" if dtype == torch.float64 else "grouped_mm"
    model, inputs = host(kind, implementation).to(dtype), given(dtype=dtype)
    output, expected = step(model, *inputs)
    convert(model, **WIDE)
    found = step(model, *inputs)
    assert torch.equal(found[0], output)
    assert_near(found[1], expected, NEAR + 4 * torch.finfo(dtype).eps)


def test_an_order_of_its_own_is_found_out_and_not_used(monkeypatch):
    """An implementation that gives the gate all rows, but in no order that is known."""

    def backwards(self, hidden_states, top_k_index, top_k_weights):
        rows = hidden_states.repeat_interleave(top_k_index.shape[1], 0).flip(0)
        experts = top_k_index.reshape(-1).flip(0)
        h = self._apply_gate(torch.einsum("sh,soh->so", rows, self.gate_up_proj[experts]))
        each = torch.einsum("si,shi->sh", h, self.down_proj[experts]).flip(0) * top_k_weights.reshape(-1, 1)
        return each.view(*top_k_index.shape, -1).sum(1)

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "backwards", backwards)
    model, inputs = host(implementation="backwards"), given()
    output, expected = step(model, *inputs)
    convert(model, **WIDE)
    for _ in range(2):
        found = step(model, *inputs)
        assert torch.equal(found[0], output)
        assert_near(found[1], expected)
    assert model.experts.rmm_orders == {"backwards": "other"}
    model.experts.config._experts_implementation = "grouped_mm"  # by set_experts_implementation
    assert_near(step(model, *inputs)[1], expected)
    assert model.experts.rmm_orders == {"backwards": "other", "grouped_mm": "sorted"}


def test_an_order_that_a_call_leaves_open_is_not_remembered():
    model = host()
    x, index, weights = given()
    expected = step(model, x, index, weights)[1]
    convert(model, **WIDE)
    own = torch.arange(EXPERTS).unsqueeze(1)  # sorted rows are in the order of tokens
    step(model, x[:EXPERTS].detach(), own, weights[:EXPERTS, :1].detach())
    assert model.experts.rmm_orders == {}
    assert_near(step(model, x, index, weights)[1], expected)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_autocast_and_indices_of_32_bits(implementation):
    """Autocast leaves "grouped_mm" in float32; our product, in bfloat16, tells the order of rows all the same."""
    model, (x, index, weights) = host(implementation=implementation), given()
    inputs = x, index.int(), weights
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = step(model, *inputs)
        convert(model, **WIDE)
        found = step(model, *inputs)
    assert torch.equal(found[0], output)
    assert_near(found[1], expected, NEAR + 4 * torch.finfo(torch.bfloat16).eps)
    assert model.experts.rmm_orders == {implementation: {"grouped_mm": "sorted"}.get(implementation, "tokens")}


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="PyTorch has no grouped_mm")
def test_products_by_group_are_those_one_by_one(monkeypatch):
    """On CPU the loop runs; where it does not, PyTorch's grouped_mm: here too, so that both are compared."""
    rows, others, weights = torch.randn(10, 16), torch.randn(10, 8), torch.randn(4, 8, 16)
    ends = torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    expected = grouped_product(rows, weights.transpose(1, 2), ends), grouped_outer(others, rows, ends)
    called = []
    grouped = lambda *args, **named: called.append(0) or F.grouped_mm(*args, **named)  # noqa: E731
    monkeypatch.setattr("rmm_linear.ops.experts._runs_grouped", lambda a, b: True)
    monkeypatch.setattr("rmm_linear.ops.experts._GROUPED", grouped)
    found = grouped_product(rows, weights.transpose(1, 2), ends), grouped_outer(others, rows, ends)
    assert len(called) == 2
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert not expected[1][1].any()


# What is saved


@pytest.mark.parametrize(
    ("needed", "kept"),
    [
        ({"x"}, ("d",)),
        ({"weights"}, ("h",)),
        ({"experts.gate_up_proj"}, ("d", "x")),
        ({"experts.down_proj"}, ("h",)),
        ({"experts.gate_up_proj_bias"}, ("d",)),
        ({"experts.down_proj_bias"}, ()),
        ({"x", "weights", "experts.gate_up_proj"}, ("h", "d", "x")),
    ],
    ids=lambda one: "-".join(sorted(one)),
)
def test_nothing_is_saved_that_no_gradient_needs(needed, kept):
    model, (x, index, weights) = host(GptOssExperts), given()
    leaves = {"x": x, "weights": weights, **dict(model.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed)
    expected = step(model, x, index, weights)[1]
    convert(model, operations="experts")
    step(model, x, index, weights)
    rows = TOKENS * CHOICES
    sizes = {"d": (rows, 2 * HIDDEN, 4), "h": (rows, HIDDEN, 3), "x": (TOKENS, WIDTH, 3)}
    parts = [part for name in kept for part in encoded_parts(*sizes[name])]
    codes = stored_bytes([((3,), torch.int64), *parts]) if kept else 0
    routing = 4 * rows + index.nbytes + weights.nbytes
    assert saved_by(model, lambda: model(x, index, weights)) == codes + routing
    assert_near(step(model, x, index, weights)[1], expected, 0.5)


def test_the_errors_of_codes_are_independent():
    """Of one matrix in all three places: equal ones would correlate by 1, others by 1 / √n."""
    matrix = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    stored = encode_experts(matrix, matrix, matrix, 4, 4, 7)
    errors = [one - matrix for one in decode_experts(stored, [(200, 128, 4)] * 3, torch.float32)]
    found = torch.corrcoef(torch.stack(errors).flatten(1))
    assert (found - torch.eye(3)).abs().max() < 5 / matrix.numel() ** 0.5


class Counted(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_a_simulated_step_decodes_without_an_operation_for_every_few_rows():
    shapes = [(2**12, 4096, 4), None, (2**12, 64, 3)]
    with FakeTensorMode(), Counted() as counted:
        stored = torch.empty(stored_bytes(experts_parts(shapes)), dtype=torch.uint8)
        found = [*decode_experts(stored, shapes, torch.bfloat16)]
    assert [None if one is None else (one.shape, one.dtype) for one in found] == [
        ((2**12, 4096), torch.bfloat16),
        None,
        ((2**12, 64), torch.bfloat16),
    ]
    assert 0 < counted.number < 50


def test_gradients_add_up_over_passes_with_errors_of_their_own():
    """The mean of R draws is √R times nearer: a seed that is taken twice, or codes that belong together, are not."""
    model, inputs = host(), given()
    expected = step(model, *inputs)[1]
    convert(model, operations="experts")
    draws = [step(model, *inputs, seed)[1] for seed in range(64)]
    for name, exact in expected.items():
        errors = torch.stack([draw[name] - exact for draw in draws]).double()
        noise = errors.square().sum() / len(draws)
        along = (errors * exact).flatten(1).sum(1)
        assert abs(along.mean()) < 5 * along.std() / math.sqrt(len(draws)), name
        assert errors.mean(0).square().sum() < 2 * noise / len(draws), name
        assert noise > 0


# Whole models


def moe_model(name, implementation="grouped_mm"):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "vocab_size": 64, "intermediate_size": 64, "pad_token_id": 1, "num_experts_per_tok": 2}
    configs = {
        "mixtral": lambda: hf.MixtralConfig(**sizes, num_local_experts=4),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=32),
        "gpt_oss": lambda: hf.GptOssConfig(**sizes, num_local_experts=4, sliding_window=16),
    }
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(configs[name](), experts_implementation=implementation).train()
    ids = torch.randint(5, 64, (2, 48), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_logits_are_the_same_and_the_configuration_is_not_touched(name, implementation):
    model, batch = moe_model(name, implementation)
    other = type(model)(model.config).train()  # of the same configuration object
    config, classes = copy.deepcopy(model.config.to_dict()), {key: type(one) for key, one in model.named_modules()}
    logits, keys = model(**batch).logits.detach(), model.state_dict().keys()
    before = saved_by(model, lambda: model(**batch).loss)
    others = saved_by(other, lambda: other(**batch).loss)
    without = convert(model, operations=[one for one in OPERATIONS if one != "experts"], dry_run=True)
    report = convert(model, operations=("experts",))
    assert list(report.packed) == [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    assert "experts=2" in report.summary()
    for _ in range(2):
        assert torch.equal(model(**batch).logits, logits)
    assert saved_by(model, lambda: model(**batch).loss) < 0.75 * before
    assert saved_by(other, lambda: other(**batch).loss) == others
    assert not any(isinstance(one, PackedExperts) for one in other.modules())
    assert (model.config.to_dict(), model.config._experts_implementation) == (config, implementation)
    assert model.state_dict().keys() == keys
    revert(model)
    assert {key: type(one) for key, one in model.named_modules()} == classes
    assert saved_by(model, lambda: model(**batch).loss) == before
    assert any(entry.endswith("experts.act_fn") for entry in without.packed) == (name != "gpt_oss")


def test_overrides_set_both_widths():
    model, _ = moe_model("mixtral")
    report = convert(model, operations="experts", overrides={r".*0\.mlp\.experts": {"bits": 4, "activation_bits": 8}})
    saved = [entry.saved for entry in report.packed.values()]
    assert saved == [
        f"tokens and products, {one} bits; the gate's derivative, {two} bits" for one, two in ((4, 8), (3, 4))
    ]


def test_activations_inside_stay_exact():
    model, _ = moe_model("mixtral")
    report = convert(model)
    assert not any("act_fn" in name for name in (*report.packed, *report.skipped))
    assert not any(
        isinstance(one.act_fn, PackedExperts.__bases__[0]) for one in model.modules() if hasattr(one, "act_fn")
    )
    revert(model)
    report = convert(model, exclude_modules=["experts"])  # then each is converted by itself
    assert report.packed["model.layers.0.mlp.experts.act_fn"].operation == "activation"
    assert report.skipped["model.layers.0.mlp.experts"] == "in exclude_modules"


def test_adapters_of_the_weights_train():
    """PEFT computes a weight in every call by a parametrization that it adds for the time of the call."""
    model, batch = moe_model("mixtral")
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=names)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0, 0.1)
    logits = model(**batch).logits.detach()
    model(**batch).loss.backward()
    expected = gradients(model)
    assert len(convert(model, **WIDE).packed) == 2
    for _ in range(2):
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        assert torch.equal(output.logits, logits)
        assert_near(gradients(model), expected)


def test_the_example_says_what_experts_save():
    model, batch = moe_model("qwen3_moe", "batched_mm")
    report = convert(model, operations="experts", example=batch)
    entry = report.memory.operations["experts"]
    assert entry.after < 0.05 * entry.before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.thorough
def test_compiled_code_is_divided_and_says_so(caplog):
    model, batch = moe_model("mixtral")
    logits = model(**batch).logits.detach()
    model(**batch).loss.backward()
    expected = gradients(model)
    convert(model, **WIDE)
    compiled = torch.compile(model, backend="aot_eager")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model.zero_grad()
            output = compiled(**batch)
            output.loss.backward()
    assert torch.equal(output.logits, logits)
    assert_near(gradients(model), expected)
    assert caplog.text.count("Mixtures of experts run outside of compiled code") == 1
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    torch.compile(model.eval(), backend="aot_eager", fullgraph=True)(**batch)


# What stays exact


class Mixing(MixtralExperts):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.softmax(gate, -1) * up


def quantized(experts):
    experts.down_proj = nn.Parameter(experts.down_proj.data.to(torch.int8), requires_grad=False)


def changed(experts, **attributes):
    for name, value in attributes.items():
        setattr(experts, name, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: changed(one, _is_expert_parallel=True), "divided among devices"),
        (lambda one: changed(one, has_post_expert_norm=True), "a norm follows each"),
        (quantized, "quantized or parametrized"),
        (lambda one: parametrize.register_parametrization(one, "down_proj", nn.Identity()), "quantized or param"),
        (lambda one: changed(one, act_fn=nn.PReLU()), r"tensors of its own \(act_fn.weight\)"),
        (lambda one: changed(one, __class__=Mixing), "takes other columns together"),
    ],
)
def test_what_cannot_be_coded_stays_exact_with_the_reason(change, reason):
    model = moe_model("mixtral")[0]
    change(model.model.layers[1].mlp.experts)
    report = convert(model, operations="experts")
    assert list(report.packed) == ["model.layers.0.mlp.experts"]
    assert reason.replace("\\", "") in report.skipped["model.layers.1.mlp.experts"]


def test_experts_that_are_divided_later_stay_exact():
    model, inputs = host(), given()
    expected = step(model, *inputs)
    convert(model, operations="experts")
    model.experts._is_expert_parallel = True
    found = step(model, *inputs)
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


def test_classes_outside_of_the_registry_save_what_their_code_multiplies():
    experts = Llama4TextExperts(hf.Llama4TextConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    report = convert(nn.ModuleDict({"experts": experts, "norm": nn.LayerNorm(8)}), dry_run=True)
    assert report.packed["experts"].saved == "what its code saves for bmm, *, in few bits"
    assert report.uncompressed == {}


def test_a_gate_is_tried_without_weights():
    with torch.device("meta"):
        experts = MixtralExperts(hf.MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2))
    assert gate_pairs(experts) == "halves"
    assert why_exact(experts) is None

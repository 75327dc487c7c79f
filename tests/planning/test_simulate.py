"""The simulated peak is that of the real step to the byte: with weights, without them, and with a loss in chunks."""

import gc

import pytest
import torch
from planning_graph_helpers import NETWORKS, llama, network, real_peak
from storage_counter import highest
from torch import fx, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from rmm_linear import convert, fit, revert
from rmm_linear.activations.calls import PackedCalls
from rmm_linear.context.code_noise import CodeNoise
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.memory.inputs import LossOfBatch, call_with
from rmm_linear.memory.peak import LiveTensors, Peak
from rmm_linear.planning import BlockPlan, PlannedBlock, measure, plan_blocks, simulate
from rmm_linear.planning.graphs.record import graph_costs
from rmm_linear.planning.step import follow
from rmm_linear.planning.step.flops import count_flops
from rmm_linear.planning.step.step import loss_of, prepared, run_step


@pytest.mark.parametrize("name", NETWORKS)
def test_simulated_peak_is_that_of_the_real_step(name):
    model, example = network(name)
    found = simulate(model, example)
    assert found.bytes == real_peak(model, example)
    assert sum(found.by_module.values()) == found.bytes
    assert found.moment.split(" of ")[0] in ("forward", "backward")
    assert max(now for now, _ in found.timeline) == found.bytes


def test_coded_convolutions_have_the_peak_of_the_real_step():
    model, example = network("cnn")
    exact = simulate(model, example).bytes
    convert(model, operations=("convolution", "activation"))
    run_step(model, example)  # finds that the batch is in memory anyway
    found = simulate(model, example)
    assert found.bytes == real_peak(model, example) < exact


def test_simulation_leaves_no_trace():
    model, example = network("cnn", blocks=2)
    model.eval()
    buffers = [buffer.clone() for buffer in model.buffers()]
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    before = torch.get_rng_state()
    simulate(model, example)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    assert parameters[0].grad is not None
    assert parameters[1].grad is None
    assert not model.training


def test_hooks_of_parameters_get_no_gradient_of_a_simulated_or_timed_step():
    """An optimizer that steps in the backward pass is such a hook."""
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
    model, x, got = nn.Sequential(*blocks), torch.randn(256, 64), []
    for number, parameter in enumerate(model.parameters()):
        kind = (parameter.register_hook, parameter.register_post_accumulate_grad_hook)[number % 2]
        kind(lambda given: got.append(given) and None)
    fit(model, x, 0.8, allow=("keep", "recompute"))
    assert not got
    revert(model)
    model(x).sum().backward()
    assert len(got) == 16


class _Filled(nn.Module):
    """Makes tables in its first forward pass."""

    def __init__(self, is_buffer):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), []
        if is_buffer:
            self.register_buffer("table", None, persistent=False)
        else:
            self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(len(x), 1)
        self.seen.append(x)
        return self.linear(x) + self.table


@pytest.mark.parametrize("is_buffer", [False, True])
def test_what_a_model_keeps_of_a_simulated_step_is_taken_away(is_buffer):
    model, x = nn.Sequential(_Filled(is_buffer), nn.Linear(8, 8)), torch.randn(16, 8)
    simulate(model, x)
    assert model[0].table is None
    assert model[0].seen == []
    plan_blocks(model, x, "1GB")
    assert type(model(x)) is torch.Tensor


def test_parameter_gradients_are_counted_and_parameters_are_not():
    layer = nn.Linear(1000, 1000, bias=False)
    assert simulate(layer, torch.ones(1, 1000)).bytes // 4 // 1000**2 == 1
    with pytest.raises(ValueError, match="depends on its trained parameters"):
        simulate(nn.ReLU(), torch.ones(3))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["roberta", "llama"])
def test_masks_are_those_that_values_ask_for(name, padded):
    """A mask of ones is left out, and attention then needs no copies of keys and values for groups of heads."""
    model, example = network(name)
    if name == "llama":
        torch.manual_seed(0)
        model = llama(num_key_value_heads=1)
    mask = torch.ones_like(example["attention_mask"])
    mask[0, -3:] = 1 - padded
    example = {**example, "attention_mask": mask}
    found = simulate(model, example).bytes
    assert found == real_peak(model, example)


# Without weights

BATCH, TOKENS, WORDS = 4, 64, 300
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192}
CONFIGS = {
    "llama": (LlamaForCausalLM, LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **SHAPE)),
    "roberta": (RobertaForSequenceClassification, RobertaConfig(vocab_size=WORDS, **SHAPE)),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(
            vocab_size=WORDS, d_model=64, d_kv=16, d_ff=192, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        ),
    ),
    "vit": (ViTForImageClassification, ViTConfig(image_size=32, patch_size=4, hidden_dropout_prob=0.1, **SHAPE)),
}  # fmt: skip


def made(name, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    kind, config = CONFIGS[name]
    with torch.device(device):
        return kind(config).to(dtype).train()


def batch(name, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, WORDS, (BATCH, TOKENS), generator=generator)
    classes = torch.zeros(BATCH, dtype=torch.long)
    if name == "vit":
        values = {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator).to(dtype), "labels": classes}
    else:
        values = {"input_ids": ids, "labels": classes if name == "roberta" else ids}
    return {key: value.to(device) for key, value in values.items()}


def both(name, dtype=torch.float32, **config):
    """The same converted model with weights and without them."""
    models = made(name, dtype), made(name, dtype, "meta")
    reports = [convert(model, **config) for model in models]
    assert str(reports[0]) == str(reports[1])
    for report in reports:  # a step after the first ones, which look at codes and try what is kept anyway
        report.context.noise, report.context.checks.is_done = CodeNoise().settled(), True
    return models


def saved(model, example):
    """Live bytes after the forward pass."""
    gc.collect()
    with LiveTensors(Peak()) as live:
        loss = loss_of(call_with(model, example))
        found = live.now
    del loss
    return found


def simulated_saved(model, example):
    found = []

    def run(model, example):
        loss = loss_of(call_with(model, example))
        found.append(live.now)
        loss.backward()

    with prepared(model, example, run) as step, LiveTensors(Peak()) as live:
        step()
    return found[0]


@pytest.mark.diagonal
@pytest.mark.parametrize("converted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_models_without_weights_take_the_bytes_of_those_with_weights(name, dtype, converted, monkeypatch):
    monkeypatch.setattr(follow, "flash_workspace", lambda *_, **__: 0)  # of a GPU's attention
    real, meta = both(name, dtype) if converted else (made(name, dtype), made(name, dtype, "meta"))
    example = batch(name, dtype)
    found = simulate(meta, batch(name, dtype, "meta"))
    assert found.measure == "simulated live tensors"
    assert found.bytes == real_peak(real, example)
    assert sum(found.by_module.values()) == found.bytes
    assert simulated_saved(meta, example) == saved(real, example)


@pytest.mark.parametrize(
    "config",
    [
        {"bits": 4, "activation_bits": 4},
        {"kind": "norm_rows"},
        {"kind": "wta", "ratio": 0.2},
        {"kind": "gaussian", "bits": None},
        {"ratio": 0.5, "activation_bits": 2, "attention_bits": 8, "norm_bits": 8},
    ],
    ids=str,
)
def test_every_configuration_takes_the_bytes_of_the_real_step(config):
    real, meta = both("llama", min_rows=16, **config)
    assert simulate(meta, batch("llama", device="meta")).bytes == real_peak(real, batch("llama"))


def test_layers_share_a_sketch_as_in_the_real_step_and_no_other_tensor_is_taken_for_it():
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            a, b = x + 1, x + 2
            return sum(layer(one) for layer, one in zip(self.layers, (a, a, b, b), strict=True))

    real, x = TwoInputs(), torch.randn(512, 64)
    with torch.device("meta"):
        meta = TwoInputs()
    for model in (real, meta):
        convert(model, ratio=0.5, bits=None, operations="linear")
    assert simulated_saved(meta, x.to("meta")) == saved(real, x)
    # a and b are dropped, and each has one sketch of half of its rows, with its seed.
    assert saved(real, x) == simulated_saved(meta, x) == 2 * (256 * 64 * 4 + 8) + 4


@pytest.mark.parametrize(
    ("name", "choice"),
    [("llama", "recompute"), ("llama", "nested"), ("roberta", "recompute"), ("roberta", "selective")],
)
def test_plans_of_converted_models_without_weights_take_the_bytes_of_the_real_step(name, choice):
    real, meta = both(name)
    block, parts = {
        "llama": ("model.layers.0", ("self_attn", "mlp")),
        "roberta": ("roberta.encoder.layer.0", ("attention", "intermediate")),
    }[name]
    inner = tuple(f"{block}.{part}" for part in parts) if choice == "nested" else ()
    plan = BlockPlan([PlannedBlock(block, choice, inner=inner)])
    plan.apply(meta)
    found = plan.simulated(batch(name, device="meta"))
    plan.revert()
    assert simulate(meta, batch(name)).bytes != found.bytes
    plan.apply(real)
    assert found.bytes == real_peak(real, batch(name))
    plan.revert()


@pytest.mark.parametrize("checkpointed", ["exact", "packed"])
def test_checkpoints_of_the_model_take_the_bytes_of_the_real_step(checkpointed):
    models = both("roberta", checkpointed=checkpointed)
    for model in models:
        for layer in model.roberta.encoder.layer:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = checkpoint
    real, meta = models
    assert simulate(meta, batch("roberta", device="meta")).bytes == real_peak(real, batch("roberta"))


def checkpoint(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def test_operations_are_counted_without_weights():
    real, meta = both("llama")
    assert count_flops(meta, batch("llama", device="meta")) == count_flops(real, batch("llama"))


def test_padding_is_unknown_without_weights_and_counts_with_them():
    real, meta = both("roberta", min_rows=16)
    example = batch("roberta")
    full = torch.ones(BATCH, TOKENS, dtype=torch.long)
    padded = full.clone()
    padded[:, TOKENS // 2 :] = 0
    examples = [{**example, "attention_mask": mask} for mask in (full, padded)]
    unknown = {**example, "attention_mask": full.to("meta")}
    found = [simulate(meta, one).bytes for one in (example, *examples, unknown)]
    # The model leaves out a mask that masks nothing; of an unknown one, it makes a mask for all scores.
    assert found[0] == found[1]
    assert found[2] == found[3] == found[0] + BATCH * TOKENS**2
    assert found[3] > real_peak(real, examples[0])
    assert simulated_saved(meta, examples[1]) > saved(real, examples[0]) > saved(real, examples[1])
    assert simulate(real, examples[1]).measure == "cpu live tensors"


def test_a_simulation_without_weights_leaves_no_trace():
    _, meta = both("llama")
    layers = [module for module in meta.modules() if isinstance(module, SketchedLayer)]
    caches = [layer.rmm_context.sketch_cache for layer in layers]
    state, parameters = torch.get_rng_state(), list(meta.parameters())
    simulate(meta, batch("llama", device="meta"))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(layer.rmm_context.sketch_cache is cache for layer, cache in zip(layers, caches, strict=True))
    assert all(a is b and a.is_meta and a.grad is None for a, b in zip(meta.parameters(), parameters, strict=True))


def test_a_simulated_model_trains_when_it_gets_its_weights():
    real, meta = both("llama")
    found = simulate(meta, batch("llama", device="meta"))
    meta.to_empty(device="cpu")
    meta.load_state_dict(real.state_dict())
    for (name, buffer), other in zip(meta.named_buffers(), real.buffers(), strict=True):
        assert buffer.copy_(other).isfinite().all(), name
    assert real_peak(meta, batch("llama")) == found.bytes
    losses = []
    for model in (real, meta):
        torch.manual_seed(2)
        losses.append(model(**batch("llama")).loss)
        losses[-1].backward()
    assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(real.parameters(), meta.parameters(), strict=True))


def test_a_gated_mlp_that_has_no_narrow_copy_saves_codes_of_its_factors():
    """On the meta device it cannot be tried whether it is one; what it multiplies is found in its code."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **{**SHAPE, "intermediate_size": 1031}))
    report = convert(model)
    assert not report.skipped
    assert [type(layer.mlp).__mro__[1] for layer in model.model.layers] == [PackedCalls] * 2


def test_shared_weights_have_one_gradient():
    def tied():
        model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(2)))
        model[1].weight = model[0].weight
        return model

    real = tied()
    with torch.device("meta"):
        meta = tied()
    assert simulate(meta, torch.ones(2, 500, device="meta")).bytes == real_peak(real, torch.ones(2, 500))


def test_norm_estimators_are_refused_without_weights():
    _, meta = both("llama", kind="wta", norm_estimator="token")
    with pytest.raises(ValueError, match="simulated without norm estimators, got norm_estimator='token'"):
        simulate(meta, batch("llama", device="meta"))


# A loss in chunks: shapes alone take no bytes

LOGITS = 4 * 256 * 8000 * 4  # bytes in float32


def wordy(device="cpu", dtype=torch.float32):
    """A model with many words, and a batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8000, use_cache=False, **sizes)).to(dtype).train()
    ids = torch.randint(0, 8000, (4, 256), generator=torch.Generator().manual_seed(1)).to(device)
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operations", [None, ("logits",), "all"], ids=["exact", "chunks", "packed"])
def test_the_peak_of_a_loss_in_chunks_is_that_of_the_storages_on_the_cpu(operations, dtype):
    (real, example), (meta, shapes) = wordy(dtype=dtype), wordy("meta", dtype)
    if operations is not None:
        for model in (real, meta):
            convert(model, **({} if operations == "all" else {"operations": operations}))
    run_step(real, example)  # what a first step tries is no part of a step
    expected = highest(real, example, lambda: run_step(real, example))
    assert real_peak(real, example) == expected
    assert simulate(real, example).bytes == expected
    assert simulate(meta, shapes).bytes == expected
    assert (expected > LOGITS) == (operations is None)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fit_meets_a_budget_below_the_logits(device):
    model, example = wordy(device)
    memory = LOGITS + sum(parameter.nbytes for parameter in model.parameters())
    report = fit(model, example, memory=memory, max_noise=1e9)
    assert report.fits
    assert report.exact_peak > memory
    if device == "cpu":
        run_step(model, example)
        assert highest(model, example, lambda: run_step(model, example)) < LOGITS


class Shapes(nn.Module):
    """Saves a tensor without bytes in addition to its input."""

    def forward(self, x):
        shapes = x.new_empty(1000, device="meta", requires_grad=True).exp()
        return x.sigmoid().view(-1)[: shapes.shape[0]]


def test_planners_count_no_tensors_on_the_meta_device():
    x = torch.ones(10, 100, requires_grad=True)
    model = nn.Sequential(nn.Sequential(nn.Linear(100, 100), Shapes()), nn.Sequential(nn.Linear(1000, 1)))
    assert sum(sum(block.storages) for block in measure(model, x).blocks) == 2 * x.nbytes  # input, sigmoid's output
    costs = graph_costs(fx.symbolic_trace(Shapes()), [x])
    assert set(costs.size.values()) == {0, x.nbytes}
    assert sum(costs.size.values()) == x.nbytes
    on_meta = graph_costs(fx.symbolic_trace(Shapes()), [x.to("meta")])  # stands for a real one
    assert sum(on_meta.size.values()) > x.nbytes


def test_the_loss_of_a_trainer_may_read_numbers_and_select_by_masks():
    """Numbers are guessed, which is noted; masks select everything, which is the most that it can take."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)

    def loss(batch):
        y, mask = model(x), batch["mask"]
        if mask.sum().item() > 1e9:
            raise AssertionError
        return y[mask].square().sum() / mask.sum().item() + torch.masked_select(y, mask[:, None]).sum()

    everything = torch.ones(32, dtype=torch.bool)
    expected = real_peak(model, LossOfBatch({"mask": everything}, loss))
    for mask in (everything, torch.arange(32) % 2 == 0):
        # The real selection makes a list of places too, for a moment.
        given = LossOfBatch({"mask": mask}, loss)
        assert expected <= simulate(model, given).bytes <= expected + 8 * 2 * 32 * 4
        assert given.guesses == {"aten._local_scalar_dense.default"}


@pytest.mark.parametrize("part", [lambda x, mask: x[:, : int(mask.sum(1).max())], lambda x, mask: x[:, mask.any(0)]])
def test_a_function_that_reads_values_is_refused_as_their_guess_may_be_far_too_small(part):
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(4, 32, 8)
    mask = torch.ones(4, 32, dtype=torch.bool)
    for plan in (simulate, lambda *given: plan_blocks(*given, "least"), lambda *given: fit(*given, 0.5)):
        with pytest.raises(ValueError, match=r"this one reads values of a tensor .* Compute what it reads outside"):
            plan(model, lambda: model(part(x, mask)).square().sum())
    assert "The model returned no loss" in str(plan_blocks(model, x, "least"))
    assert "The model returned no loss" not in str(plan_blocks(model, lambda: model(x).sum(), "least"))


def test_a_pass_for_reference_without_gradients_is_no_part_of_the_step():
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), torch.randn(64, 8)

    def loss():
        with torch.no_grad():
            before = model(x)
        y = model(x)
        with torch.no_grad():
            after = model(x)
        return (y - before - after).square().sum()

    found, expected = (measure(model, one).blocks for one in (loss, lambda: model(x).square().sum()))
    for name in ("name", "storages", "flops"):
        assert [getattr(block, name) for block in found] == [getattr(block, name) for block in expected]
    assert [block.kept for block in found[1:-1]] == [block.kept for block in expected[1:-1]]

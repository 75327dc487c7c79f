"""Simulated steps of quantized layers take the bytes of real ones: of bitsandbytes, and of tensor subclasses."""

import pytest
import torch
from planning_graph_helpers import real_peak
from quantized_helpers import LAYERS, batch, coded, in_bitsandbytes, llama, with_adapters
from torch import nn

from rmm_linear import convert, fit, revert
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.planning import BlockPlan, PlannedBlock, measure, simulate

KINDS = [(4, False), (4, True), (8, False)]
WIDTH, TEMPORARY = 2048, 64 * 2048 * 4


def both(bits, double=True):
    """The same model under LoRA, quantized on the CPU, and on the meta device, where it is yet to be."""
    return [
        with_adapters(in_bitsandbytes(llama(device), bits, double=double, device=device)) for device in ("cpu", "meta")
    ]


def held(model):
    """Bytes of all storages that a model holds, as bitsandbytes lays them out."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code]
            tensors += [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
        tensors += [weight.SCB] if hasattr(weight, "SCB") else []
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


@pytest.fixture
def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: the test extra has it on Linux")


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("bits", "double"), KINDS)
def test_quantized_models_count_what_storages_hold_and_what_a_real_step_takes(bits, double, bitsandbytes):
    """Once, fake tensors could not be made: "Creating a new Tensor subclass Params4bit but the raw Tensor …"."""
    real, meta = both(bits, double)
    kind = bitsandbytes.nn.Linear4bit if bits == 4 else bitsandbytes.nn.Linear8bitLt
    assert sum(isinstance(module, kind) for module in real.modules()) == LAYERS
    static = static_memory(real)
    assert static.parameters + static.buffers == held(real)
    assert static_memory(meta) == static
    found = simulate(real, batch())
    assert found.measure == "simulated live tensors"
    assert found.bytes == simulate(meta, batch("meta")).bytes == real_peak(real, batch())
    assert static_memory(real) == static  # once more, after steps


@pytest.mark.parametrize("bits", [4, 8])
def test_a_simulation_leaves_quantized_layers_as_they_are(bits, bitsandbytes):
    layer = {4: bitsandbytes.nn.Linear4bit, 8: bitsandbytes.nn.Linear8bitLt}[bits]
    settings = {"compute_dtype": None} if bits == 4 else {"has_fp16_weights": False}
    model = nn.Sequential(nn.Linear(64, 64), layer(64, 64, **settings).to("cpu"))
    before = [dict(vars(model[1])), dict(vars(model[1].weight)), vars(getattr(model[1], "state", nn.Module())).copy()]
    simulate(model, torch.randn(8, 64))
    after = [vars(model[1]), vars(model[1].weight), vars(getattr(model[1], "state", nn.Module()))]
    for one, other in zip(before[:2], after[:2], strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] is other[name] for name in one)
    if bits == 8:
        assert all(before[2][name] is after[2][name] for name in before[2])
    assert type(model(torch.randn(8, 64))) is torch.Tensor


@pytest.mark.parametrize("double", [False, True])
def test_the_dequantized_weight_is_there_in_both_passes(double, bitsandbytes):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, WIDTH, bias=False)).train()
    layer = in_bitsandbytes(nn.Sequential(model[1]), 4, double=double)[0]
    found = simulate(nn.Sequential(model[0], layer), torch.randn(1, 64))
    for moment in ("forward of 1", "backward of 1"):
        highest = max(now for now, when in found.timeline if when == moment)
        scales = double * (64 * WIDTH // 64) * 4 * (2 if moment.startswith("forward") else 1)
        assert TEMPORARY + scales <= highest < TEMPORARY + scales + 6 * WIDTH * 4, moment


def test_plans_take_the_bytes_of_the_real_step(bitsandbytes):
    found = []
    for model, device in zip(both(4), ("cpu", "meta"), strict=True):
        plan = BlockPlan([PlannedBlock("base_model.model.model.layers.0", "recompute")])
        plan.apply(model)
        found.append(simulate(model, batch(device)).bytes)
        if device == "cpu":
            real = real_peak(model, batch())
        plan.revert()
    assert found[0] == found[1]
    # Inside of an operator, the weight of a forward pass is seen by no count of live tensors on a CPU.
    assert 0 <= found[0] - real <= 128 * 512 * 2 + 2 * 4 * 128 * 512 // 64


def test_a_search_for_gated_mlps_leaves_weights_that_train(bitsandbytes, monkeypatch):
    """Some CPUs get other packed weights in eval mode, which have no gradient; the first input's dtype is kept, too."""
    packed = []
    monkeypatch.setattr(bitsandbytes.nn.modules, "_convert_weight_packed_for_cpu", lambda *args: packed.append(args))
    model = in_bitsandbytes(llama(), 4)
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu, module.compute_dtype, module.compute_type_is_set = True, None, False
    model = with_adapters(model)
    assert sum(name.endswith(".mlp") for name in convert(model).packed) == 1
    assert packed == []
    layer = model.base_model.model.model.layers[0].mlp.up_proj.base_layer
    assert layer.support_avx512bf16_for_cpu
    assert not layer.compute_type_is_set


def pieces(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        layers = [nn.Linear(16, 64), coded(nn.Linear(64, 512)), nn.GELU(), coded(nn.Linear(512, 32, bias=False))]
    return nn.Sequential(*layers)


def test_a_tensor_subclass_counts_as_the_tensors_that_it_consists_of():
    """Codes and scales of 64 × 512 and 512 × 32 weights; with a temporary of a whole weight in a step."""
    real, meta, x = pieces(), pieces("meta"), torch.randn(4, 16)
    expected = (17 * 64 + 512) * 4 + (64 * 512 + 512 * 32) + (512 + 32) * 4
    assert static_memory(real).parameters == static_memory(meta).parameters == expected
    assert static_memory(real).gradients == (17 * 64 + 512) * 4
    found = simulate(real, x)
    assert found.bytes == simulate(meta, x.to("meta")).bytes == real_peak(real, x)
    assert found.bytes > 64 * 512 * 4
    assert measure(real, x).peak.bytes == found.bytes


def test_a_model_with_tensor_subclasses_fits_a_budget():
    model, x = pieces(), torch.randn(4, 16)
    report = fit(model, x, 0.99, allow=("keep", "recompute"))
    assert report.fits
    revert(model)


def test_weights_of_torchao_count_as_they_are_packed():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: nothing asks for it")
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 512, bias=False), nn.GELU()).bfloat16()
    quantization.quantize_(real[1:], quantization.Int8WeightOnlyConfig())
    x = torch.randn(4, 16, dtype=torch.bfloat16)
    assert static_memory(real).parameters == 17 * 64 * 2 + 64 * 512 + 512 * (4 + 1)  # with a scale and a zero point
    found = simulate(real, x).bytes
    assert found == real_peak(real, x) > 64 * 512 * 2
    real.to("meta")
    assert simulate(real, x.to("meta")).bytes == found

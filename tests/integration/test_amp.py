"""Mixed precision: outputs and losses of the exact model, gradients unbiased, fewer bytes; overflows skip a step."""

import pytest
import torch
from cases import ROUGH_BODY, WHOLE_BODY, architectures
from helpers import ALL_ARCHITECTURES, gradients, labelled, loss_of, tiny_model
from statistical import assert_unbiased

from rmm_linear import convert
from rmm_linear.activations.lazy_logits import LazyLogits
from rmm_linear.memory import track_saved
from rmm_linear.packing.pack import pack
from rmm_linear.variance import required_ratio, sgd_variance, simulate_variance, sketch_variance

TYPES = {
    "float32": (torch.float32, None),
    "autocast float16": (torch.float32, torch.float16),
    "autocast bfloat16": (torch.float32, torch.bfloat16),
    "all bfloat16": (torch.bfloat16, None),
}
types = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)


def made(architecture, dtype=torch.float32, *, dropout=0.0, width=16, **fields):
    model = tiny_model(architecture, dropout=dropout, layers=1, width=width).to(dtype).train()
    model.config.use_cache = False
    if fields:
        convert(model, **fields)
        if model.get_output_embeddings() is not None:
            model.get_output_embeddings().rmm_chunk = 7
    return model


def forward(model, batch, autocast):
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        return model(**batch)


def step(model, batch, autocast):
    model.zero_grad()
    output = forward(model, batch, autocast)
    output.loss.backward()
    return output, gradients(model)


def without_attention_dropout(model):
    """Whose rounding would be seen."""
    for name in ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    for module in model.modules():
        for name in ("attention_dropout", "dropout_prob", "dropout"):  # T5's attention has a number
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@types
@pytest.mark.parametrize("architecture", [*ALL_ARCHITECTURES, "resnet"])
def test_outputs_are_the_exact_models(architecture, types):
    """To the bit, hidden dropout included. Logits are read late. Gradients have the dtype of their weights."""
    dtype, autocast = types
    batch, found = labelled(architecture, dtype), []
    for fields in ({}, WHOLE_BODY):
        model = made(architecture, dtype, dropout=0.1, **fields)
        without_attention_dropout(model)
        torch.manual_seed(4)
        found.append(step(model, batch, autocast))
    (exact, want), (output, got) = found
    assert got.keys() == want.keys()
    assert all(one.isfinite().all() and one.dtype == dtype for one in got.values())
    assert output.loss.dtype == exact.loss.dtype
    is_chunked = model.get_output_embeddings() is not None
    half = torch.finfo(autocast or dtype).eps
    assert abs(output.loss - exact.loss) <= is_chunked * 4 * half * exact.loss
    assert isinstance(output.logits, LazyLogits) == is_chunked
    logits = output.logits * 1
    assert logits.dtype == (exact.logits * 1).dtype
    assert torch.equal(torch.stack(tuple(logits)), exact.logits)


@pytest.mark.diagonal
@types
@pytest.mark.parametrize("architecture", ["roberta", "gpt2", "llama", "t5", "resnet"])
def test_gradients_are_unbiased_and_bytes_fewer(architecture, types):
    """The projection's band has room for the half type's own rounding."""
    dtype, autocast = types
    batch = labelled(architecture, dtype)
    exact, model = made(architecture, dtype), made(architecture, dtype, **WHOLE_BODY)
    want = step(exact, batch, autocast)[1]
    room = 2 * torch.finfo(autocast or dtype).eps
    torch.manual_seed(1)
    assert_unbiased(lambda _: step(model, batch, autocast)[1], want, draws=16, widest=0.05, room=room)
    saved = []
    for network in (exact, model):
        with track_saved(network) as kept:
            loss = forward(network, batch, autocast).loss
        saved.append(kept.total)
        del loss
    assert saved[1] < 0.6 * saved[0], saved


@pytest.mark.parametrize(
    "fields", [{"bits": 4}, {"kind": "wta"}, {"kind": "gaussian"}], ids=["4 bits", "wta", "gaussian"]
)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_other_sketches_are_unbiased_in_half_types(fields, autocast):
    batch = labelled("llama", torch.float32)
    want, model = step(made("llama"), batch, autocast)[1], made("llama")
    names = [f"{name}.weight" for name in convert(model, **{**ROUGH_BODY, **fields}).converted]
    room = 2 * torch.finfo(autocast).eps
    torch.manual_seed(1)
    exact = {name: want[name] for name in names}
    assert_unbiased(lambda _: step(model, batch, autocast)[1], exact, draws=25, widest=0.2, room=room)


@pytest.mark.diagonal
@architectures
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_a_code_under_autocast_is_that_of_a_model_in_the_half_type(architecture, autocast):
    """A tenth of the bytes of a half type holds fewer bits than one of float32; both save the same of linear layers."""
    saved = []
    for dtype, enabled in ((torch.float32, autocast), (autocast, None)):
        model = made(architecture, dtype, width=64)
        report = convert(model, min_rows=8, memory=0.1, operations="linear")
        forward(model, labelled(architecture, dtype), enabled)
        plans = {name: model.get_submodule(name).rmm_plan for name in report.converted}
        saved.append(
            {name: [one.spec for one in (plan, *plan.by_valid.values())] for name, plan in plans.items() if plan}
        )
    assert saved[0] == saved[1]
    assert len(saved[0]) >= 4


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["countsketch", "gaussian", "hadamard"])
def test_diagnostics_are_those_of_full_precision(kind, bits):
    x, y = torch.randn(128, 64), torch.randn(128, 16)
    what = {"kind": kind, "bits": bits}

    def numbers():
        torch.manual_seed(1)
        return [
            sketch_variance(x, y, rows=32, **what),
            sgd_variance(x, y, samples=(8, 16)),
            required_ratio(x, grad_output=y, target=1.0, samples=(8, 16), **what),
            torch.tensor(simulate_variance(x, y, rows=32, draws=40, **what).interval()),
            *pack(x, 4, torch.zeros(1, dtype=torch.int64)),
        ]

    plain = numbers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, numbers(), plain))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("roberta", {}), ("llama", {"bits": 4}), ("roberta", {"kind": "wta"})],
    ids=["roberta", "llama, 4 bits", "wta"],
)
def test_grad_scaler_skips_an_overflowing_step_and_goes_on(architecture, fields):
    """float16 gradients times 2⁴⁰ overflow: the step is skipped, the scale halved, until they are finite."""
    model = made(architecture)
    sketched = [f"{name}.weight" for name in convert(model, **{**ROUGH_BODY, **fields}).converted]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    skipped = 0
    for _ in range(40):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, architecture).float()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        else:
            break
    assert 0 < skipped < 40
    moved = [not torch.equal(model.get_parameter(name), before[name]) for name in sketched]
    assert any(moved) if "kind" in fields else all(moved)  # wta may draw none of the tokens that carry a gradient
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())

"""Mixed precision: float16 with GradScaler, bfloat16 autocast, all bfloat16; overflowing steps are skipped as usual."""

import pytest
import torch
from cases import ROUGH_BODY, architectures
from helpers import ALL_ARCHITECTURES, batch_of, gradients, loss_of, tiny_model, token_ids
from statistical import assert_unbiased

from rmm_linear import convert
from rmm_linear.packing.pack import pack
from rmm_linear.variance import required_ratio, sgd_variance, simulate_variance, sketch_variance


def made(architecture, dtype=torch.float32, width=16):
    return tiny_model(architecture, dropout=0.0, layers=1, width=width).to(dtype).train()


def step(model, architecture, dtype, autocast):
    """Loss and gradients of a model in ``dtype``."""
    model.zero_grad()
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch_of(architecture).items()}
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = loss_of(model, architecture, batch).float()
    loss.backward()
    return loss.detach(), gradients(model)


def check_unbiased(model, architecture, dtype, autocast, exact, names):
    """The projection's band has room for the half type's own rounding."""
    torch.manual_seed(1)
    assert_unbiased(
        lambda _: step(model, architecture, dtype, autocast)[1],
        {name: exact[name] for name in names},
        draws=25,
        widest=0.2,
        room=2 * torch.finfo(autocast or dtype).eps,
    )


@architectures
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, torch.float16), (torch.float32, torch.bfloat16), (torch.bfloat16, None)],
    ids=["autocast float16", "autocast bfloat16", "all bfloat16"],
)
def test_half_types_are_those_of_the_exact_model_and_unbiased(architecture, dtype, autocast):
    """Gradients have the dtype of their weights."""
    plain, model = made(architecture, dtype), made(architecture, dtype)
    loss, exact = step(plain, architecture, dtype, autocast)
    sketched = {f"{name}.weight" for name in convert(model, **ROUGH_BODY).converted}
    again, found = step(model, architecture, dtype, autocast)
    assert torch.equal(loss, again)
    assert found.keys() == exact.keys()
    assert {value.dtype for value in found.values()} == {dtype}
    half = torch.finfo(autocast or dtype).eps
    for name in found.keys() - sketched:  # their products are of the half type, and summed in another order
        error = (found[name] - exact[name]).norm() / exact[name].norm()
        assert error < 16 * half or exact[name].norm() < 1e-6, name
    check_unbiased(model, architecture, dtype, autocast, exact, sketched)


@pytest.mark.parametrize(
    "fields", [{"bits": 4}, {"kind": "wta"}, {"kind": "gaussian"}], ids=["4 bits", "wta", "gaussian"]
)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_other_ways_to_keep_an_input_are_unbiased_in_half_types(fields, autocast):
    _, exact = step(made("llama"), "llama", torch.float32, autocast)
    model = made("llama")
    sketched = {f"{name}.weight" for name in convert(model, **{**ROUGH_BODY, **fields}).converted}
    check_unbiased(model, "llama", torch.float32, autocast, exact, sketched)


@pytest.mark.diagonal
@architectures
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
def test_the_default_chooses_its_bits_under_autocast(architecture, autocast):
    """Of 64 columns and more, as the groups are that packing turns; a model in the half type predicts the same."""
    chosen = []
    for dtype, enabled in ((torch.float32, autocast), (autocast, None)):
        model = made(architecture, dtype, width=64)
        report = convert(model, min_rows=8)
        for _ in range(6):
            loss, found = step(model, architecture, dtype, enabled)
        assert all(value.isfinite().all() for value in (loss, *found.values()))
        choices = {name: model.get_submodule(name).rmm_auto_bits for name in report.converted}
        chosen.append({name: choice for name, choice in choices.items() if choice.bits is not None})
    under, without = chosen
    assert under.keys() == without.keys()
    assert len(under) >= 4
    for name, choice in under.items():
        assert choice.noise == pytest.approx(without[name].noise, rel=0.1), name


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


def test_a_model_that_is_all_bfloat16_trains_in_it():
    model = made("roberta", torch.bfloat16)
    convert(model, **ROUGH_BODY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels = token_ids()[:, 0] % 2
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(input_ids=token_ids(), labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        *((architecture, {}) for architecture in ALL_ARCHITECTURES),
        ("roberta", {"bits": 4}),
        ("roberta", {"kind": "wta"}),
    ],
    ids=[*ALL_ARCHITECTURES, "4 bits", "wta"],
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

"""Mixed precision: float16 with GradScaler, bfloat16 autocast, all bfloat16; overflowing steps are skipped as usual."""

import math

import pytest
import torch
from helpers import gradients, tiny_model, token_ids

from rmm_linear import convert

ROUGH = {"kind": "countsketch", "ratio": 0.25, "min_rows": 8}
LAYER = "roberta.encoder.layer.0.intermediate.dense.weight"
EXACT = "roberta.embeddings.word_embeddings.weight"


def made(converted, dtype=torch.float32):
    model = tiny_model("roberta", dropout=0.0, layers=1).to(dtype).train()
    if converted:
        convert(model, **ROUGH)
    return model


def loss_of(model, dtype=None):
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        return model(input_ids=token_ids()).logits.float().square().mean()


def projection(run, exact, draws=40):
    torch.manual_seed(1)
    values = torch.stack([(run() * exact).sum() / exact.square().sum() for _ in range(draws)])
    return values.mean().item(), (values.std() / math.sqrt(draws)).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_is_that_of_the_exact_model_and_unbiased(dtype):
    """Sketched weights are float32 with float32 gradients; the projection's band has room for the half type's own."""
    plain, model = made(False), made(True)
    loss_of(plain, dtype).backward()
    exact = gradients(plain)
    assert torch.equal(loss_of(model, dtype), loss_of(plain, dtype))

    def run():
        model.zero_grad()
        loss_of(model, dtype).backward()
        return model.get_parameter(LAYER).grad.clone()

    mean, error = projection(run, exact[LAYER])
    assert model.get_parameter(LAYER).grad.dtype == torch.float32
    assert torch.allclose(
        model.get_parameter(EXACT).grad, exact[EXACT], rtol=0.05, atol=1e-3 * exact[EXACT].abs().max()
    )
    assert abs(mean - 1) < 4 * error + 2 * torch.finfo(dtype).eps
    assert error < 0.2


def test_a_model_that_is_all_bfloat16_trains_in_it():
    plain, model = made(False, torch.bfloat16), made(True, torch.bfloat16)
    loss_of(plain).backward()
    exact = gradients(plain)

    def run():
        model.zero_grad()
        loss_of(model).backward()
        return model.get_parameter(LAYER).grad.float()

    mean, error = projection(run, exact[LAYER].float())
    assert model.get_parameter(LAYER).grad.dtype == torch.bfloat16
    assert abs(mean - 1) < 4 * error + 0.02
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


@pytest.mark.parametrize("fields", [{}, {"bits": 4}, {"kind": "wta"}], ids=["rows", "4 bits", "wta"])
def test_grad_scaler_skips_an_overflowing_step_and_goes_on(fields):
    """float16 gradients times 2³² overflow: the step is skipped, the scale halved, until they are finite."""
    model = made(False)
    convert(model, **{**ROUGH, **fields})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    skipped = 0
    for _ in range(40):
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(loss_of(model, torch.float16)).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        else:
            break
    assert 0 < skipped < 40
    assert not torch.equal(model.get_parameter(LAYER), before[LAYER])
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())

"""How often the host reads a number that a device has made: it waits for all that was asked of the device before."""

import sys
from pathlib import Path

import pytest
import torch
from cases import needs_triton
from helpers import ARCHITECTURES, batch_of, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

import rmm_linear
from rmm_linear import RMMConfig, convert
from rmm_linear.activations import attention_function
from rmm_linear.config import OPERATIONS
from rmm_linear.context import left_out
from rmm_linear.context.call_inputs import AttentionMask, HostRead
from rmm_linear.context.left_out import LeftOut

ROOT = Path(rmm_linear.__file__).parent
# The C library takes numbers, and is on no device; kernels in the interpreter are NumPy's.
ON_HOST = tuple(str(ROOT / part) for part in ("backends/native", "ops/native", "sketches/seeds.py"))
READS = ["__bool__", "__int__", "__float__", "__index__", "item", "tolist"]


@pytest.fixture
def reads(monkeypatch):
    """The places of the library that have read a number."""
    found = []

    def counted(read):
        def run(self, *args):
            file = sys._getframe(1).f_code.co_filename
            if file.startswith(str(ROOT)) and not file.startswith(ON_HOST):
                found.append(f"{file}:{sys._getframe(1).f_lineno}")
            return read(self, *args)

        return run

    for name in READS:
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    for module in (attention_function, left_out):
        monkeypatch.setattr(module, "waits", lambda device: True)
    refuse = LeftOut.refuse

    def uncounted(self):
        """At its end a pass reads what was known as it began: the device has all of the pass to do, and is not idle."""
        before = len(found)
        refuse(self)
        del found[before:]

    monkeypatch.setattr(LeftOut, "refuse", uncounted)
    return found


CASES = [(architecture, "auto") for architecture in (*ARCHITECTURES, "t5")]


@pytest.mark.parametrize(
    ("architecture", "backend"), [*CASES, pytest.param("llama", "triton", marks=[needs_triton, pytest.mark.thorough])]
)
def test_a_forward_pass_reads_at_most_once_from_the_second_step_on(architecture, backend, reads, monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", backend)
    model = tiny_model(architecture, layers=2 if backend == "auto" else 1)
    convert(model, RMMConfig(kind="countsketch", min_rows=8, memory=0.2))
    for step in range(7 if backend == "auto" else 2):
        reads.clear()
        output = model(**batch_of(architecture, 20 if backend == "auto" else 13))
        most = 2 if architecture == "t5" else 1  # encoder and decoder have a mask each
        assert step == 0 or len(reads) <= most + 2 * (step == 3), (
            reads
        )  # rows of all modules that have seen three, and noise
        (output.loss if architecture == "t5" else output.logits[:, :5].square().mean()).backward()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("quality", ["default", "careful"])
def test_a_backward_pass_reads_nothing_after_the_first_steps(quality, autocast, reads):
    """Not even of padding, at which some layers look in every step. Attention in slices does, which is for CPUs."""
    model = tiny_model("roberta", width=256)
    convert(model, quality=quality, min_rows=8, operations=[one for one in OPERATIONS if one != "attention"])
    for step in range(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch_of("roberta")).logits.square().mean()
        reads.clear()
        loss.backward()
        assert step < 4 or not {*reads}, sorted({*reads})


def test_a_mask_that_hides_nothing_is_dropped():
    """On every device: with an index, every operation would take its rows one by one."""
    mask = torch.ones(4, 20)
    assert AttentionMask.of(mask).ranks is None
    mask[1, 12:] = 0
    assert AttentionMask.of(mask).ranks.valid_count == 72


class Attending(nn.Module):
    """A module that makes its mask itself: padding is hidden in every step but the third."""

    def __init__(self):
        super().__init__()
        self.project, self.step = nn.Linear(8, 8), 0

    def forward(self, x, attention_mask):
        q = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        seen = attention_mask[:, None, None, :].bool().expand(-1, 1, x.shape[1], -1)
        self.step += 1
        return F.scaled_dot_product_attention(q, q, q, attn_mask=seen | (self.step == 3)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Attending()

    def forward(self, x, attention_mask):
        return self.inner(x, attention_mask)


def test_an_answer_that_is_wrong_later_is_an_error_and_the_next_step_is_right(monkeypatch):
    monkeypatch.setattr(attention_function, "waits", lambda device: True)
    model = Model().train()
    convert(model, RMMConfig(operations=["attention"], min_rows=1))
    mask = torch.ones(2, 10)
    mask[1, 6:] = 0

    def step():
        model.zero_grad()
        output = model(torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(1)), mask).flatten(2)
        (output * mask.unsqueeze(-1)).square().sum().backward()
        return model.inner.project.weight.grad

    step()
    step()
    with pytest.raises(RuntimeError, match="the mask of this step lets one"):
        step()
    for _ in range(2):
        model.inner.step = 2  # such a mask again: now its keys are saved, and stay so
        found = step()
    model.inner.step = 2
    rmm_linear.revert(model)
    expected = step()
    assert (found - expected).norm() < 0.2 * expected.norm()


class Twice(Model):
    """One module that runs twice, with a mask that hides padding and with one that does not."""

    def forward(self, x, attention_mask):
        self.inner.step = 1
        first = self.inner(x, attention_mask)
        self.inner.step = 2
        return first + self.inner(x, attention_mask)


def test_two_masks_in_a_forward_pass(monkeypatch):
    monkeypatch.setattr(attention_function, "waits", lambda device: True)
    model = Twice().train()
    convert(model, RMMConfig(operations=["attention"], min_rows=1))
    mask = torch.ones(2, 10)
    mask[1, 6:] = 0
    for _ in range(3):
        output = model(torch.randn(2, 10, 8), mask).flatten(2)
        (output * mask.unsqueeze(-1)).square().sum().backward()


def test_a_number_is_read_when_its_own_device_has_it(monkeypatch):
    """And not when the current device is done, which may be another one."""
    recorded = []

    class Event:
        def record(self, stream):
            recorded.append(stream)

        def synchronize(self):
            recorded.append("waited")

    class OnDevice:
        is_cuda, shape, dtype, device = True, (1,), torch.int64, torch.device("cuda:1")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    place = torch.zeros(1, dtype=torch.int64)
    place.copy_ = lambda values, non_blocking: place
    monkeypatch.setattr(torch, "empty", lambda *_, **__: place)
    assert HostRead(OnDevice()).values == [0]
    assert recorded == ["stream of cuda:1", "waited"]

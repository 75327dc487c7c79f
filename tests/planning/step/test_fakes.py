"""Simulated steps multiply groups of rows as real ones do, in every dtype."""

import pytest
import torch
from planning_graph_helpers import real_peak
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from rmm_linear import fit
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.planning import simulate
from rmm_linear.planning.step.fakes import Fakes
from rmm_linear.planning.step.flops import count_flops, flop_counter

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no products of groups")
EXPERTS, CHOSEN, HIDDEN, INNER, TOKENS = 4, 2, 64, 128, 64
FORMS = {
    "rows": ((16, 8), (2, 8, 24)),
    "sum": ((16, 8), (8, 24)),
    "columns": ((2, 16, 8), (8, 24)),
    "batch": ((2, 16, 8), (2, 8, 24)),
}


def mixtral(device="cpu"):
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(
        vocab_size=100, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, use_cache=False,
        experts_implementation="grouped_mm", **shape,
    )  # fmt: skip
    with torch.device(device):
        return MixtralForCausalLM(config)


def batch(device="cpu"):
    ids = torch.arange(TOKENS, device=device).view(2, -1) % 100
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_have_the_shape_of_the_real_operator(form, dtype):
    a, b = (torch.ones(shape, dtype=dtype) for shape in FORMS[form])
    offs = None if form == "batch" else torch.tensor([4, {"rows": 16, "sum": 8, "columns": 24}[form]]).int()
    real = F.grouped_mm(a, b, offs=offs)
    fakes = Fakes()
    given = [None if one is None else fakes(one) for one in (a, b, offs)]
    with fakes.mode, flop_counter() as counter:
        found = F.grouped_mm(given[0], given[1], offs=given[2])
    assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)
    assert counter.get_total_flops() == 2 * 16 * 8 * 24 * (2 if form == "batch" else 1)


def test_experts_in_float32_take_the_bytes_of_the_real_step():
    """PyTorch's rule for fake tensors knows bfloat16 alone: "Expected inputs of BF16 type but got …"."""
    real = mixtral()
    assert simulate(real, batch()).bytes == simulate(mixtral("meta"), batch("meta")).bytes == real_peak(real, batch())


def test_operations_of_experts_are_counted():
    """Three passes of two products, of which one is twice as wide, for every chosen expert of a token."""
    grouped = 3 * 2 * TOKENS * CHOSEN * (2 * INNER * HIDDEN + INNER * HIDDEN)
    assert count_flops(mixtral("meta"), batch("meta")) > grouped


def test_a_model_of_experts_fits_a_budget():
    report = fit(mixtral("meta"), batch("meta"), "1GB")
    assert {block.choice for block in report.plan.blocks} == {"keep"}
    assert report.peak == static_memory(mixtral()).before_step + real_peak(mixtral(), batch())

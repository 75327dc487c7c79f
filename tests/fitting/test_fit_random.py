"""Models at random: a fit says that a budget cannot be met, or no step ever takes more. And the largest batches."""

import tempfile

import pytest
import torch
from fit_cases import Normed, assert_untouched, rows, snapshot, stack, tokens
from helpers import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from offload_helpers import Transformer
from planning_graph_helpers import real_peak
from torch import nn

import rmm_linear
from rmm_linear.fitting.static_memory import static_memory
from rmm_linear.planning.step.resize import resized

FEW, MANY = (
    settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
    for count in (3, 10)
)
ACTIVATIONS = {"gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh}


@st.composite
def models(draw):
    """A model with a batch."""
    torch.manual_seed(draw(st.integers(0, 99)))
    width, count = draw(st.sampled_from([8, 16, 32])), draw(st.integers(1, 4))
    dropout, activation = draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from(sorted(ACTIVATIONS)))
    batch, is_shared = draw(st.sampled_from([2, 3, 8])), draw(st.booleans())
    kind = draw(st.sampled_from(["language", "mlp", "images"]))
    if kind == "language":
        model = Transformer(dropout, blocks=count, width=width)
        if is_shared:
            model.blocks = nn.ModuleList([model.blocks[0]] * max(count, 2))
        example = torch.randint(0, 600, (batch, draw(st.sampled_from([2, 24, 96]))))
    elif kind == "mlp":
        one = nn.Sequential(nn.Linear(width, width), ACTIVATIONS[activation]())
        others = [Normed(width, dropout) for _ in range(count)]
        model = nn.Sequential(*([one, one] if is_shared else [one]), *others, nn.Linear(width, 3))
        example = torch.randn(16 * batch, width)
    else:
        blocks = [
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(dropout))
            for _ in range(count)
        ]
        model = nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.Linear(8 * 36, 10))
        example = torch.randn(batch, 3, 8, 8)
    if draw(st.booleans()):
        for parameter in list(model.parameters())[:: draw(st.integers(2, 3))]:
            parameter.requires_grad_(False)
    if draw(st.booleans()):
        model = model.bfloat16()
        example = example.bfloat16() if example.is_floating_point() else example
    return model.train(), example


PARTS = [
    ("keep", "recompute"),
    ("keep", "sketch", "pack"),
    ("pack", "recompute"),
    ("keep", "pack", "recompute"),
    ("recompute", "offload"),
    ("recompute", "offload", "tile"),
]

ANY = given(
    models(),
    st.sampled_from([0.3, 0.5, 0.7, 0.85, 0.95, 1.0]),
    st.sampled_from(PARTS),
    st.sampled_from([0.5, 1e9]),
    st.sampled_from(["time", "noise"]),
)


@FEW
@ANY
def test_no_step_takes_more_than_the_budget(made, share, allow, max_noise, objective):
    check_steps(made, share, allow, max_noise, objective)


@pytest.mark.thorough
@MANY
@ANY
def test_no_step_of_many_takes_more_than_the_budget(made, share, allow, max_noise, objective):
    check_steps(made, share, allow, max_noise, objective)


def check_steps(made, share, allow, max_noise, objective):
    model, example = made
    before = snapshot(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = rmm_linear.fit(
                model, example, share, allow=allow, max_noise=max_noise, objective=objective, folder=folder
            )
        except ValueError as error:
            if "cannot be met: the least is" not in str(error) and "are needed before anything is saved" not in str(
                error
            ):
                raise
            assert_untouched(model, before)
            return
        assert report.memory == int(share * report.exact_peak)
        check_report(model, example, report)


def check_report(model, example, report):
    """Check that real steps take what was simulated, within the budget, and plain ones what the exact model takes."""
    static = static_memory(model).before_step
    peaks = {static + real_peak(model, example) for _ in range(2)}
    assert report.memory is None or report.measured_peak <= report.memory
    assert max(peaks) <= report.measured_peak == report.simulated_peak
    # The first step with compressed activations, which fit measures, finds out what later ones need not keep.
    assert peaks == {report.measured_peak} or any(block.choice == "convert" for block in report.plan.blocks)
    rmm_linear.revert(model)
    assert static + real_peak(model, example) == report.exact_peak


def test_choices_of_several_words_take_what_was_simulated(tmp_path):
    torch.manual_seed(3)
    model, example = Transformer(0.1, blocks=1, width=32).train(), torch.randint(0, 600, (2, 320))
    least = rmm_linear.fit(model, example, "least", allow=("recompute", "offload", "tile"), folder=str(tmp_path))
    assert any(len(block.words) > 1 for block in least.plan.blocks)
    check_report(model, example, least)
    assert not [*tmp_path.rglob("offload-*")]


class WithTable(nn.Module):
    """Takes tensors that do not depend on the batch, of which one has more rows."""

    def __init__(self):
        super().__init__()
        self.inner = stack(2)

    def forward(self, x, table, scale):
        return self.inner(x) * scale + table.sum()


def with_table():
    return WithTable().train(), {"x": rows(64), "table": torch.ones(100, 5), "scale": torch.tensor(2.0)}


def llama():
    model = tiny_model("llama", layers=1).train()
    model.config.use_cache = False
    return model, tokens("llama")


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("make", "memory", "allow"),
    [
        (lambda: (stack(2).train(), rows(64)), "200KB", ("keep", "sketch", "pack")),
        pytest.param(llama, "250KB", ("keep", "recompute"), marks=pytest.mark.thorough),
        (with_table, "200KB", ("keep", "recompute")),
    ],
    ids=["mlp", "llama", "table"],
)
def test_the_largest_batch_fits_and_one_more_exact_row_does_not(make, memory, allow):
    model, example = make()
    before = snapshot(model)
    found = rmm_linear.max_batch(model, example, memory, allow=allow, max_noise=1e9)
    assert_untouched(model, before)
    assert found.exact <= found.batch
    static = static_memory(model).before_step
    assert static + real_peak(model, resized(example, found.exact)) <= found.memory
    assert static + real_peak(model, resized(example, found.exact + 1)) > found.memory
    found.plan.apply()
    assert static + real_peak(model, resized(example, found.batch)) == found.peak <= found.memory


@pytest.mark.thorough
def test_the_noise_of_one_sequence_is_not_known_and_not_infinite():
    """For the bytes of larger batches it is repeated; copies of a sequence have no variance."""
    model, example = llama()
    found = rmm_linear.max_batch(model, {name: tensor[:1] for name, tensor in example.items()}, "250KB")
    assert any(note.startswith("The variance ratio is not measured") for note in found.notes)
    assert not any("exceeds max_noise" in note for note in found.notes)


def test_a_budget_below_the_parameters_has_no_batch():
    found = rmm_linear.max_batch(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), rows(), 300, allow=("keep", "recompute"))
    assert (found.batch, found.exact, found.checkpointed, found.plan) == (0, 0, 0, None)


@pytest.mark.parametrize(
    ("example", "memory", "error", "text"),
    [
        (rows(), "8GB", ValueError, "max_noise must be positive"),
        (rows(), 0.5, TypeError, "A share has no meaning here"),
        (rows(), None, TypeError, "memory must be bytes or a text"),
        (rows(), "least", TypeError, "memory must be bytes or a text"),
        (rows(), 0, ValueError, "at least one byte"),
        (rows(), "8 gigs", ValueError, "memory must be a size"),
        (lambda: 1, "1MB", ValueError, "a function as the example does not allow"),
        (rows(0), "1MB", ValueError, "of one row or more"),
        ({}, "1MB", TypeError, "must have the arguments of Sequential"),
        (torch.tensor(1.0), "1MB", ValueError, "must be a batch with tensors"),
    ],
)
def test_max_batch_says_what_it_needs(example, memory, error, text):
    with pytest.raises(error, match=text):
        rmm_linear.max_batch(stack(1).train(), example, memory, max_noise=-1 if memory == "8GB" else 1.0)

"""Codes that add more noise than their gradient bears take more bits after the first steps."""

import copy
import logging
import pickle

import pytest
import torch
from helpers import bytes_kept
from torch import nn
from torch.nn import functional as F

from rmm_linear import RMMConfig, convert, revert
from rmm_linear.context.code_noise import MOST_NOISE, ROUNDS, CodeNoise, width_below
from rmm_linear.context.first_steps import MOST_WAITS
from rmm_linear.context.learned import STEPS
from rmm_linear.conversion.exact import set_aside
from rmm_linear.conversion.state import load_sketch_state, sketch_state


class Images(nn.Module):
    """SiLU of small numbers, where its derivative is nearly the same everywhere, and BatchNorm behind it or not."""

    def __init__(self, normalizes=True):
        super().__init__()
        self.first, self.act, self.last = nn.Conv2d(3, 16, 1), nn.SiLU(), nn.Conv2d(16, 8, 1)
        self.norm = nn.BatchNorm2d(8) if normalizes else nn.Identity()
        self.weights = nn.Parameter(torch.randn(8, 8, 8), requires_grad=False)
        nn.init.normal_(self.first.weight, 0, 0.02)

    def forward(self, x):
        return (self.norm(self.last(self.act(self.first(x)))) * self.weights).sum()


class Classes(nn.Module):
    """Two layers that read the same tokens, whose two classes pull in opposite directions, or not."""

    def __init__(self, is_balanced=True):
        super().__init__()
        self.one, self.other, self.act = nn.Linear(32, 16), nn.Linear(32, 16), nn.ReLU()
        sign = torch.ones(64) if not is_balanced else torch.arange(64).remainder(2) * 2.0 - 1
        self.signs = nn.Parameter(sign.unsqueeze(1), requires_grad=False)

    def forward(self, x):
        x = self.act(x)
        return ((self.one(x) + self.other(x).tanh()) * self.signs).sum()


class Gated(nn.Module):
    """A gated MLP."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Pixels(nn.Module):
    """A convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.Linear(32, 32), nn.Conv1d(64, 8, 1)

    def forward(self, x):
        return self.conv(self.first(x).unsqueeze(0)).squeeze(0).T


class Own(nn.Module):
    """Functions and a product in the module's own code."""

    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(32, 32), nn.Parameter(torch.ones(32))
        self.weight = nn.Parameter(torch.randn(8, 32))

    def forward(self, x):
        return F.linear(self.first(x) * self.scale, self.weight)


class Signed(nn.Module):
    """A module of rows that are alike, whose gradients pull in opposite directions, or not."""

    def __init__(self, kind, is_balanced=True):
        super().__init__()
        self.inner, self.is_balanced = kind(), is_balanced

    def forward(self, x):
        y = self.inner(x)
        sign = torch.arange(len(y)).remainder(2).unsqueeze(1) * 2.0 - 1
        return (sign * y if self.is_balanced else y).sum()


_CODED = {Gated: ["activation"], Pixels: ["convolution"], Own: ["linear", "activation"]}


def made(kind, *arguments):
    torch.manual_seed(0)
    if kind in _CODED:
        x = torch.randn(1, 32).expand(64, 32) + 0.01 * torch.randn(64, 32)
        return Signed(kind, *arguments).train(), x, {"operations": _CODED[kind], "min_rows": 8}
    model = kind(*arguments).train()
    if kind is Images:
        return model, torch.randn(4, 3, 8, 8), {"operations": ["activation"]}
    return model, torch.randn(1, 32).expand(64, 32) + 0.05 * torch.randn(64, 32), {"min_rows": 8}


def step(model, x):
    model.zero_grad()
    model(x).backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def converted(kind, *arguments, steps=STEPS + 1):
    model, x, how = made(kind, *arguments)
    report = convert(model, **how)
    for _ in range(steps):
        step(model, x)
    return model, x, report


@pytest.mark.parametrize(
    ("kind", "is_useless", "found"),
    [
        (Images, True, ["act"]),
        (Images, False, []),
        (Classes, True, ["one", "other"]),
        (Classes, False, []),
        (Gated, True, ["inner"]),
        (Gated, False, []),
        (Pixels, True, ["inner.conv"]),
        (Pixels, False, []),
        (Own, True, ["inner", "inner.first"]),
        (Own, False, []),
    ],
)
def test_what_takes_more_bits_and_says_so(kind, is_useless, found, caplog):
    caplog.set_level(logging.INFO, "rmm_linear")
    _, _, report = converted(kind, is_useless)
    assert sorted(report.widened) == found
    assert all(noise > MOST_NOISE for _, noise in report.widened.values())
    assert (f"the codes of {len(found)} converted modules" in caplog.text) == bool(found)
    for name, (bits, noise) in report.widened.items():
        assert f"now {bits} bits, as noise was {noise:.2g} of the gradient" in report.table()
        assert report.to_dict()["widened"][name] == [bits, noise]


def noise(model, x, name, draws):
    """‖ĝ − g‖ / ‖g‖ of a parameter, over draws."""
    exact = copy.deepcopy(model)
    revert(exact)
    step(exact, x)
    expected, found = exact.get_parameter(name).grad, []
    with set_aside(model):
        for seed in range(draws):
            torch.manual_seed(seed)
            step(model, x)
            found.append(float((model.get_parameter(name).grad - expected).square().sum()))
    return (sum(found) / draws) ** 0.5 / float(expected.norm())


@pytest.mark.parametrize(("kind", "module", "name"), [(Images, "act", "first.bias"), (Classes, "one", "one.weight")])
def test_the_noise_is_that_of_the_parameter_and_falls_below_the_bound(kind, module, name):
    """Of 16 numbers or more and 24 draws, a mean square lies within a third of its expectation."""
    model, x, report = converted(kind, steps=STEPS)
    before = noise(model, x, name, 24)
    for _ in range(2 * STEPS):
        step(model, x)
    estimate = report.widened[module][1]
    assert estimate > MOST_NOISE
    if estimate < 3:  # above it, little of what is left besides noise is known
        assert abs(estimate / before - 1) < 0.35
    assert before > MOST_NOISE > noise(model, x, name, 24)


class Scaled(nn.Module):
    """A parameter, so that what follows has an input that is a result, and what follows."""

    def __init__(self, inner, channels):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.randn(channels)), inner

    def forward(self, x):
        return self.inner(x.movedim(1, -1).mul(self.scale).movedim(-1, 1))


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.batches = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(2, 12, 6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return torch.bmm(F.linear(x.mT, self.weight), self.batches) * self.scale


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.one(x.mT) * self.other(x.mT)


_CODES = {
    "convolution": (lambda: nn.Conv2d(8, 12, 3, padding=1), (4, 8, 10, 10), "weight", 0),
    "groups": (lambda: nn.Conv2d(8, 12, 3, 2, 1, dilation=2, groups=4), (4, 8, 11, 9), "weight", 0),
    "depthwise": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (20, 16, 8, 8), "weight", 0),
    "padded": (lambda: nn.Conv1d(8, 6, 5, padding="same"), (3, 8, 50), "weight", 0),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 3, 2, 1, 1, groups=2), (4, 8, 7, 7), "weight", 0),
    "function": (Calls, (2, 8, 50), "weight", 0),
    "batches": (Calls, (2, 8, 50), "batches", 2),
    "scale": (Calls, (2, 8, 50), "scale", 4),
    "one": (Gates, (2, 8, 50), "one.bias", 1),
    "other": (Gates, (2, 8, 50), "other.bias", 0),
    "gate": (lambda: Last(Gated()), (2, 32, 50), "inner.gate_proj.bias", 0),
    "up": (lambda: Last(Gated()), (2, 32, 50), "inner.up_proj.bias", 1),
}


class Last(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", _CODES)
def test_the_variance_is_that_of_the_gradient_and_so_is_the_square(case, dtype):
    """A mean square of 6 numbers or more over 60 draws has a standard error of 0.1, as neighbours correlate.

    In bfloat16 the gradient's own rounding, 2^-9 of each number, is far below codes of 3 and 4 bits.
    """
    torch.manual_seed(0)
    kind, shape, name, place = _CODES[case]
    model = Scaled(kind(), shape[1]).train().to(dtype)
    last = torch.channels_last if case == "depthwise" else torch.contiguous_format
    sizes = torch.rand(shape[1]).view(-1, *(1,) * (len(shape) - 2))
    x = (torch.randn(shape) * sizes).to(dtype).contiguous(memory_format=last)
    model = model.to(memory_format=last)
    weights = torch.randn(model(x).shape)

    def gradient():
        model.zero_grad()
        (model(x) * weights).sum().backward()
        return model.inner.get_parameter(name).grad.double()

    exact = gradient()
    context = convert(model, operations=["linear", "convolution", "activation"], min_rows=8).context
    module = "inner.inner" if case in ("gate", "up") else "inner"
    index, predicted, found, squares = context.names.index(module), 0.0, 0.0, 0.0
    for _ in range(60):
        context.noise = CodeNoise()
        made = gradient()
        variance, square = context.noise._sums[index, place].tolist()
        found, predicted = found + float((made - exact).square().sum()), predicted + variance
        squares += square / float(made.square().sum()) / 60
    assert abs(predicted / found - 1) < 0.4
    assert abs(squares - 1) < 0.02


@pytest.mark.parametrize(
    ("how", "expected"),
    [({"bits": 8}, 8), ({"bits": 1.6}, 8), ({"bits": None}, 8), ({"bits": None, "activation_bits": 1}, None)],
)
def test_a_call_in_own_code_widens_what_is_noisy_and_no_other_code(how, expected):
    """The activation's noise is 2.9 of its gradient in 4 bits; linear layers are exact, or as narrow as asked for."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 32))

        def forward(self, x):
            return F.linear(F.silu(x), self.weight)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(32, 32), Inner()

        def forward(self, x):
            y = self.inner(0.02 * self.first(x))
            return (y * (torch.arange(len(y)).remainder(2).unsqueeze(1) * 2.0 - 1)).sum()

    torch.manual_seed(0)
    model, x = Outer().train(), torch.randn(1, 32).expand(64, 32) + 0.05 * torch.randn(64, 32)
    exact = step(model, x)[-1]
    report = convert(model, operations=["linear", "activation"], min_rows=8, exclude_modules="first", **how)
    for _ in range(STEPS + 1):
        step(model, x)
    assert report.widened.get("inner", (None,))[0] == expected
    if how["bits"] is None:
        assert torch.equal(step(model, x)[-1], exact)  # of the weight, whose input stays as it is


def test_more_bits_would_be_fewer_rows_where_memory_is_given():
    model, x, _ = made(Classes)
    report = convert(model, memory=0.3, bits=3, min_rows=8)
    for _ in range(STEPS + 1):
        step(model, x)
    assert report.widened == {}


def test_doubles_are_looked_at():
    model, x, how = made(Pixels)
    report = convert(model.double(), **how)
    for _ in range(STEPS + 1):
        step(model, x.double())
    assert list(report.widened) == ["inner.conv"]


def test_layers_that_share_a_code_still_do():
    model, x, report = converted(Classes)
    bits = report.widened["one"][0]
    assert report.widened["one"] == report.widened["other"]
    assert report.groups == [("one", "other")]
    exact = made(Classes)[0]
    convert(exact, bits=bits, min_rows=8, operations=["linear", "activation"])
    for _ in range(3):
        step(exact, x)
    assert bytes_kept(model, x) == bytes_kept(exact, x)


def test_gradients_and_seeds_are_the_same_until_then_and_nothing_is_looked_at_after_it():
    """What is looked at draws no random numbers."""
    model, x, report = converted(Images, False)
    twin, _, how = made(Images, False)
    convert(twin, **how).context.noise = CodeNoise().settled()
    for _ in range(STEPS + 1):
        step(twin, x)
    assert report.context.noise.rounds > 0
    assert not report.context.noise.is_observing
    assert not report.context.noise.is_full
    assert model.act._packed_call((4, 3, 8), x.device).noise is None
    torch.manual_seed(5)
    one = step(model, x)
    torch.manual_seed(5)
    assert all(map(torch.equal, one, step(twin, x)))


@pytest.mark.parametrize("way", ["copy", "pickle", "state"])
def test_copies_and_saved_states_know_it(way):
    model, x, report = converted(Images)
    if way == "state":
        twin, _, how = made(Images)
        convert(twin, **how)
        load_sketch_state(twin, sketch_state(model))
    else:
        twin = copy.deepcopy(model) if way == "copy" else pickle.loads(pickle.dumps(model))
    assert twin.act.rmm_bits == 8
    assert twin.act.rmm_context.noise.widened == report.context.noise.widened
    assert twin.act.rmm_context.noise.rounds == report.context.noise.rounds
    assert bytes_kept(twin, x) == bytes_kept(model, x)
    revert(twin)
    assert not any("rmm" in name for module in twin.modules() for name in vars(module))


def test_a_state_of_other_modules_is_refused():
    model, _, _ = converted(Images)
    state = sketch_state(model)
    for widened, message in (({"another": [8, 2.0]}, "got 'another' in addition"), ({"act": [8]}, "the result of")):
        with pytest.raises(ValueError, match=message):
            load_sketch_state(model, {**state, "code_noise": {"rounds": 1, "widened": widened}})
    assert sketch_state(model) == state


def test_passes_that_are_no_training_steps_do_not_count():
    model, x, how = made(Images)
    report = convert(model, **how)
    with torch.no_grad():
        model(x)
    with set_aside(model):
        for _ in range(STEPS + 1):
            step(model, x)
    assert report.widened == {}
    assert report.context.noise == CodeNoise()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        for _ in range(STEPS + 1):
            step(model, x)
    assert list(report.widened) == ["act"]


def test_where_nothing_is_coded_one_round_is_enough():
    """But for passes without a backward pass, which show nothing."""
    model, x = nn.Sequential(nn.Linear(32, 8), nn.Dropout(0.5)).train(), torch.randn(64, 32)
    report = convert(model, operations=["dropout"])
    for runs_backward, is_over in ((False, False), (True, True)):
        for _ in range(STEPS + 1):
            output = model(x).sum()
            if runs_backward:
                output.backward()
            del output
        assert (report.context.noise.rounds == ROUNDS) == is_over


def test_a_pipeline_that_never_drains_is_told_once_that_nothing_is_decided(caplog):
    model, x, how = made(Images)
    report, waiting = convert(model, **how), [model(x)]
    for _ in range(STEPS + 2 * MOST_WAITS):
        waiting.append(model(x))
        waiting.pop(0).backward()
    assert caplog.text.count(f"each of the last {MOST_WAITS} forward passes") == 1
    assert "drain the pipeline once" in " ".join(str(report).split())
    assert not report.widened
    waiting.pop().backward()
    model(x)
    assert list(report.widened) == ["act"]
    assert "drain the pipeline" not in str(report)


def test_steps_that_overflow_count_nothing():
    model, x, how = made(Images)
    report = convert(model, **how)
    (model(x) * torch.inf).backward()
    for _ in range(STEPS):
        step(model, x)
    assert list(report.widened) == ["act"]


@pytest.mark.parametrize(("kind", "how"), [(Classes, {"bits": 8}), (Classes, {"bits": 1.6}), (Classes, {"ratio": 0.5})])
def test_what_takes_no_more(kind, how):
    """The widest codes; normal ones and sketches of fewer rows, which are not looked at."""
    model, x, fields = made(kind)
    report = convert(model, RMMConfig(**fields, **how))
    for _ in range(STEPS + 1):
        step(model, x)
    assert report.widened == {}


def test_rounds_end():
    noise = CodeNoise()
    for count in range(1, 4):
        for _ in range(STEPS):
            assert noise.is_observing
            noise.note_pass()
        noise.add(0, torch.tensor(1.0), torch.tensor(1.0), 3)
        noise.add(1, torch.tensor(1.0), torch.tensor(100.0), 3)
        assert noise.decide([(1, 2)]) == {0: (8, 1000.0)}
        noise.note_widened({0: (8, 1000.0)})
        assert noise.rounds == count
    assert not noise.is_observing


@pytest.mark.parametrize(("bits", "is_useless"), [(2, False), (3, True), (4, True)])
def test_two_bits_have_much_noise_without_any_gradients_that_cancel(bits, is_useless):
    noise = CodeNoise()
    noise.add(0, torch.tensor(0.36), torch.tensor(1.36), bits)
    assert list(noise.decide([])) == [0] * is_useless


def test_a_code_that_cannot_be_wider_hides_no_other_one_of_its_module():
    noise = CodeNoise()
    noise.add(0, torch.tensor(1.0), torch.tensor(1.0), 8)
    noise.add(0, torch.tensor(0.36), torch.tensor(1.36), 3, site=2)
    ((bits, found),) = noise.decide([]).values()
    assert (bits, found) == (4, pytest.approx(0.6))


@pytest.mark.parametrize(
    ("noise", "bits", "expected"),
    [(0.6, 3, 4), (2.0, 3, 8), (1000.0, 3, 8), (0.6, 2, 4), (0.6, 4, 8), (9.0, 8, 8)],
)
def test_as_few_bits_as_are_enough(noise, bits, expected):
    assert width_below(noise, bits) == expected

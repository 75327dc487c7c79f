"""What every operation and operator of the table keeps: one test for each property, over all of them.

A new operation is tried without being named here: it is in the table, and its samples say what it takes.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from contextlib import nullcontext

import pytest
import torch
from cases import needs_triton
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import rmm_linear.losses  # noqa: F401 - the one operator outside of ops/
from rmm_linear import ops, packing
from rmm_linear.backends.native import library, transforms
from rmm_linear.ops.dispatch import OPERATIONS, OPERATORS, Case
from rmm_linear.ops.native.derivatives import derivative_table
from rmm_linear.packing.rounding import scales_of
from rmm_linear.sketches.seeds import Fresh
from rmm_linear.spec import SaveSpec

for module in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"rmm_linear.ops.{module.name}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [(6, 70), (16, 130), (1, 64), (0, 70), (3, 0), (5, 1), (9, 3)]
# Which rows are valid or stored, and how matrices lie in memory.
PLACES = [("all", "rows"), ("some", "columns"), ("none", "steps"), ("listed", "transposed"), ("all", "transposed")]
# PyTorch's own rules are tried where something is special: a shape, a dtype, rows that are left out.
FEW = [
    Case(),
    Case(6, 70, torch.bfloat16, "some", "transposed"),
    Case(1, 1, torch.float32, "listed"),
    Case(0, 70, torch.float64),
    Case(5, 130, torch.float16, "none", "columns"),
]

every_row = pytest.mark.parametrize("row", OPERATIONS.values(), ids=lambda row: row.name)
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda one: one.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
every_place = pytest.mark.parametrize("place", PLACES, ids="-".join)
few_cases = pytest.mark.parametrize("case", FEW, ids=lambda case: f"{case.rows}-{case.columns}-{case.dtype}")
# In the interpreter a kernel takes seconds. The kernels' own tests compare all of them with plain PyTorch; here, what
# dispatch and operators add is tried on one of each family, and on all of them where tests are thorough.
ONE_OF_EACH = ("sketch", "pack_norm", "apply_gated", "attention_backward")


def on_kernels(*values, few):
    return pytest.param(*values, marks=[needs_triton, *([] if few else [pytest.mark.thorough])])


@pytest.fixture(autouse=True)
def _as_a_layer_calls_it():
    """Operators run inside of functions of autograd, and plain PyTorch makes the samples."""
    with torch.no_grad():
        yield


@pytest.fixture
def samples(monkeypatch):
    """Return calls that plain PyTorch has made the arguments of."""

    def make(row, case, setting="auto"):
        monkeypatch.setenv("RMM_BACKEND", "torch")
        calls = list(row.samples(case))
        monkeypatch.setenv("RMM_BACKEND", setting)
        return calls

    return make


def parts_of(tree):
    """The values that a tree of containers is made of."""
    if isinstance(tree, dict):
        tree = tree.values()
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    if isinstance(tree, (list, tuple)) or type(tree) is type({}.values()):
        return [part for one in tree for part in parts_of(one)]
    return [tree]


def tensors_of(tree):
    return [part for part in parts_of(tree) if isinstance(part, Tensor)]


def changed(tree, change):
    """The same tree with other tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: changed(one, change) for name, one in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(changed(one, change) for one in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(changed(one, change) for one in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and tensors_of(tree):
        return type(tree)(*(changed(getattr(tree, field.name), change) for field in dataclasses.fields(tree)))
    return tree


def same(found, expected):
    """Whether all tensors are equal to the bit."""
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    return all(
        one.dtype == other.dtype and one.shape == other.shape and torch.equal(as_bits(one), as_bits(other))
        for one, other in pairs
    )


def as_bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor


def has_scales(codes, tensor):
    """Whether a tensor may be the scales of codes: a byte for a group of 64 columns."""
    is_matrix = codes.dim() == 2 and tensor.dtype == torch.uint8 and tensor.dim() == 2 and len(tensor) == len(codes)
    return is_matrix and 16 * (tensor.shape[1] - 1) < codes.shape[1] <= 64 * tensor.shape[1]


def assert_alike(found, expected, row, dtype):
    """Within the tolerance of a row: indices and seeds to the bit, codes by their share, numbers by their norm."""
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    assert all(one.dtype == other.dtype and one.shape == other.shape for one, other in pairs)
    while pairs:
        one, other = pairs.pop(0)
        if one.dtype == torch.uint8 and pairs and has_scales(one, pairs[0][0]):
            assert_packed_alike((one, other), pairs.pop(0), row.moved)
        elif not one.numel():
            continue
        elif one.dtype == torch.uint8:
            assert (one != other).sum() <= allowed(one, row.moved)
        elif one.is_floating_point():
            assert_near(one, other, row.error, {dtype, one.dtype})
        else:
            assert torch.equal(one, other)


def allowed(codes, moved):
    return max(1, moved * codes.numel()) if moved else 0


def assert_packed_alike(codes, scales, moved):
    """On the edge of two scales a group can take the next one, which moves its codes: such rows are not compared."""
    steps = (scales[0].int() - scales[1].int()).abs()
    mean = moved * steps.numel()
    assert steps.numel() == 0 or (steps.max() <= bool(moved) and steps.sum() <= 1 + mean + 3 * mean**0.5)
    kept = ~steps.any(1)
    assert (codes[0] != codes[1])[kept].sum() <= allowed(codes[0], moved)


def assert_near(found, expected, error, dtypes):
    """By the rounding of the dtypes; the interpreter cuts off to bfloat16, what it multiplies and what it makes."""
    halves = {torch.float16: 5e-3, torch.bfloat16: 2e-2}
    limit = max(halves.get(dtype, error) for dtype in dtypes)
    found, expected = found.double(), expected.double()
    assert torch.equal(found.isfinite(), expected.isfinite())
    difference = (found - expected).where(found.isfinite(), 0).norm()
    assert difference <= limit * expected.where(expected.isfinite(), 0).norm() + 1e-30


def assert_near_when_unpacked(found, expected, call):
    """Each is within half a step of what it packed, which differs by a rounding to the half type."""
    (matrix, seed, *others), _ = call
    (bits,) = (getattr(one, "bits", one) for one in others if isinstance(one, (int, float, SaveSpec)))
    unpacked = [packing.decode(*packed, seed, bits, matrix.shape[1], torch.float32) for packed in (found, expected)]
    step = float(scales_of(expected[1]).max()) if unpacked[1].numel() else 0.0
    room = step * unpacked[1].numel() ** 0.5 + 1e-2 * unpacked[1].norm()
    assert (unpacked[0] - unpacked[1]).norm() <= room


def test_the_table_has_all_of_them():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("rmm_linear::")]
    registered = {name.partition("::")[2].partition(".")[0] for name in names}
    assert {name for name in registered if not name.endswith("_of_the_tests")} == set(OPERATORS)
    assert len(OPERATIONS) >= 21
    for one in (*OPERATIONS.values(), *OPERATORS.values()):
        assert list(one.samples(Case())), one.name


@pytest.mark.pairs
@every_row
@every_dtype
@every_place
@every_size
def test_the_library_makes_what_plain_pytorch_makes(row, dtype, place, size, samples):
    check_backend(row, Case(*size, dtype, *place), "auto", samples)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's, in the interpreter
@pytest.mark.parametrize("case", [Case(), *(on_kernels(case, few=False) for case in FEW[1:])], ids=str)
@every_row
@needs_triton
def test_the_kernels_make_what_plain_pytorch_makes(row, case, samples):
    check_backend(row, case, "triton", samples)


def check_backend(row, case, setting, samples):
    for one, other in zip(samples(row, case), samples(row, case, setting), strict=True):
        found, expected = row(*one.arguments, **one.named), row.plain(*other.arguments, **other.named)
        if row.rounds_sums or case.dtype.itemsize > 2:
            assert_alike((found, one), (expected, other), row, case.dtype)  # what is written to is among the arguments
        else:
            assert_near_when_unpacked(found, expected, one)


# Operations that operators hand seeds to which are not in their place yet. Kernels of derivatives need them there.
SEEDED = "SKETCH PACKED_SKETCH PACK ENCODE DIRECTED SAMPLE_ROWS PACK_NORM NORMALIZE SQUARE"
SEEDED += " PACK_GATED GATE PACK_TOKENS PACK_CHANNELS"


CASES = [Case(), Case(taken="some"), Case(taken="none"), Case(0, 70), Case(3, 0)]
CALLED = [(name, setting, case) for name in SEEDED.split() for setting in ("torch", "auto") for case in CASES]
CALLED += [
    on_kernels(name, "triton", case, few=case.taken == "some" and name in ("SKETCH", "ENCODE"))
    for name in SEEDED.split()
    for case in CASES
]


@pytest.mark.parametrize(("name", "setting", "case"), CALLED, ids=str)
def test_a_seed_that_is_to_be_written_gives_what_a_written_one_does(name, setting, case, samples):
    row, places = OPERATIONS[name], []

    def unwritten(tensor):
        if tensor.tolist() not in (case.seeds.tolist(), [77, -5]):
            return tensor
        places.append((torch.zeros_like(tensor), tensor))
        return Fresh(places[-1][0], tuple(tensor.tolist()))

    for one, other in zip(samples(row, case, setting), samples(row, case, setting), strict=True):
        made = changed(one, unwritten)
        found, expected = row(*made.arguments, **made.named), row(*other.arguments, **other.named)
        assert same(found, expected)
    assert all(torch.equal(place, seeds) for place, seeds in places)
    assert places or not list(row.samples(case))


@pytest.mark.diagonal
@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_share_the_rows(row, dtype, samples):
    """Of the C library, which gives a thread 65,536 elements at least."""
    case, before, found = Case(600, 300, dtype), torch.get_num_threads(), []
    for threads in (1, 3):
        calls = samples(row, case)[-3:]
        torch.set_num_threads(threads)
        try:
            found.append([(row(*one.arguments, **one.named), one) for one in calls])
        finally:
            torch.set_num_threads(before)
    assert_alike(*found, row, dtype)
    assert same(*found) or not row.by_row or row.name == "NORM_GRADIENTS"  # whose sums have another order


HIGHEST = library.level() if library.is_available() else 0
SUMS = {"PACK_NORM", "NORM_GRADIENTS", "ATTENTION_BACKWARD", "PACK_CHANNELS", "CHANNEL_GRADIENTS"}  # in their own order


@pytest.mark.pairs
@pytest.mark.parametrize("level", [level for level in (0, 3) if level < HIGHEST])
@pytest.mark.parametrize("row", [row for row in OPERATIONS.values() if row.native], ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("taken", ["all", "some"])
def test_every_generation_of_processors_makes_the_same(level, row, dtype, taken, samples, monkeypatch):
    """To the bit; of more groups of columns than a batch of any level has, and a short one."""
    found, case = [], Case(37, 64 * 19 + 23, dtype, taken)
    for one in (level, HIGHEST):
        monkeypatch.setattr(library, "level", lambda one=one: one)
        calls = samples(row, case)
        found.append([(row(*call.arguments, **call.named), call) for call in calls])
    assert_alike(*found, row, dtype)
    assert row.name in SUMS or all(map(torch.equal, *map(tensors_of, found)))  # a zero may have another sign


@pytest.mark.diagonal
@every_row
@pytest.mark.parametrize("setting", ["torch", "auto"])
@pytest.mark.parametrize("default", ["meta", torch.float64, torch.float16], ids=str)
def test_the_defaults_of_pytorch_change_nothing(row, setting, default, samples):
    """Neither the default device nor the default dtype."""
    before, found = torch.get_default_dtype(), []
    for changes in (False, True):
        calls = samples(row, Case(8, 70, taken="some"), setting)
        derivative_table.cache_clear()
        transforms._plan.cache_clear()
        try:
            if changes and isinstance(default, torch.dtype):
                torch.set_default_dtype(default)
            elif changes:
                torch.set_default_device(default)
            found.append([(row(*one.arguments, **one.named), one) for one in calls])
        finally:
            torch.set_default_dtype(before)
            torch.set_default_device(None)
    assert same(*found)


# A NaN makes the whole gradient NaN, so what is rounded after it is of no use.
NOTE_NAN = ("PACK_DERIVATIVE", "ACTIVATE")
STAY = [row for row in OPERATIONS.values() if row.by_row and row.name not in NOTE_NAN]


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("row", "setting"),
    [
        *((row, setting) for setting in ("torch", "auto") for row in STAY),
        *(on_kernels(row, "triton", few=row.name.lower() in ONE_OF_EACH) for row in STAY),
    ],
    ids=lambda one: getattr(one, "name", one),
)
@pytest.mark.parametrize("taken", ["some", "all"])
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_stays_in_its_row(row, setting, taken, samples):
    case, place = Case(taken=taken), 2
    for one, other in zip(samples(row, case), samples(row, case, setting), strict=True):
        first = next((part for part in tensors_of(one) if part.is_floating_point()), None)
        if first is None:
            continue  # a mask of numbers that are never NaN
        first[place] = math.nan
        results = [(row(*call.arguments, **call.named), call) for call in (one, other)]
        compared = 0
        for found, expected in zip(*map(tensors_of, results), strict=True):
            rows = {case.rows: torch.arange(case.rows)}
            if case.index is not None:
                rows[len(case.index)] = case.index
            if len(found) in rows and found is not first:
                others = rows[len(found)] != place
                assert same(found[others], expected[others])
                compared += 1
        assert compared


# The samples of operators call all operations but those of directions.
CALLED_ALONE = [
    pytest.param(one, marks=[] if "DIRECTED" in name else [pytest.mark.thorough]) for name, one in OPERATIONS.items()
]


@pytest.mark.parametrize("one", [*OPERATORS.values(), *CALLED_ALONE], ids=lambda one: f"{one.name}")
@pytest.mark.parametrize("taken", [pytest.param("all", marks=pytest.mark.thorough), "some"])
def test_no_accelerator_is_waited_for(one, taken, samples, monkeypatch):
    """Tensors without numbers, on a device that is no CPU: what asks for one raises."""
    run = getattr(one, "plain", None) or one.function
    # Without a fused kernel, rows that were left out are found by numbers of the index.
    waits = taken == "some" and "attention_backward" in one.name.lower()
    for call in samples(one, Case(taken=taken), "torch"):
        there = changed(call, lambda tensor: tensor.to("meta"))
        with pytest.raises(NotImplementedError, match="no data") if waits else nullcontext():
            made = tensors_of(run(*there.arguments, **there.named))
            host = 1 if one.name == "attention_with_dropout" else 0  # the state of a generator, which the host has
            assert sum(tensor.device.type != "meta" for tensor in made) == host


def flat(operator, call):
    return call.arguments if operator.flatten is None else operator.flatten(*call.arguments, **call.named)


@pytest.mark.diagonal
@every_operator
@few_cases
def test_operators_keep_the_rules_of_pytorch(operator, case, samples, monkeypatch):
    """Schema, fakes, autograd; the compiler once for all rows and once for some, with shapes that vary."""
    monkeypatch.setattr("rmm_linear.ops.save.draw_seed", lambda: 77)  # each of two runs would draw its own
    for place, call in enumerate(samples(operator, case)):
        rules = ["test_schema", "test_autograd_registration", "test_faketensor"]
        rules += ["test_aot_dispatch_dynamic"] if place == 0 and case in FEW[:2] else []
        torch.library.opcheck(operator.definition, flat(operator, call), test_utils=rules)


@pytest.mark.parametrize(
    "operator",
    [on_kernels(one, few=one.name in ONE_OF_EACH) for one in OPERATORS.values()],
    ids=lambda one: one.name,
)
def test_operators_on_the_kernels_keep_the_rules_of_pytorch(operator, samples, monkeypatch):
    monkeypatch.setattr("rmm_linear.ops.save.draw_seed", lambda: 77)
    rules = ["test_schema", "test_faketensor"]
    for call in samples(operator, Case(taken="some"), "triton"):
        torch.library.opcheck(operator.definition, flat(operator, call), test_utils=rules)


@pytest.mark.diagonal
@every_operator
@few_cases
def test_eager_code_gets_what_the_operator_makes(operator, case, samples):
    for call in samples(operator, case):
        torch.manual_seed(1)
        found = operator(*call.arguments, **call.named)
        torch.manual_seed(1)
        expected = operator.definition(*flat(operator, call))
        if None in parts_of(found):  # which a schema cannot say
            expected = [one for one, own in zip(expected, found, strict=True) if own is not None]
        assert same(found, expected)


DRAWS = {"fresh_sketch"}  # whatever it is given
SEEDED = {name for name, one in OPERATORS.items() if "Int? seed" in str(one.definition._opoverload._schema)} | DRAWS


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("seed", [7, None])
def test_seeds_decide_and_are_drawn_where_none_is_given(name, seed, samples):
    """The second of two draws differs; with a seed, the global generator is not touched."""
    operator, differ = OPERATORS[name], []
    is_random = name in (DRAWS if seed is not None else SEEDED)
    for call in samples(operator, Case(seed=seed)):
        torch.manual_seed(3)
        state = torch.get_rng_state()
        first, second = (operator(*call.arguments, **call.named) for _ in range(2))
        assert is_random or torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(3)
        assert same(operator(*call.arguments, **call.named), first)
        differ.append(not same(first, second))
    assert any(differ) == is_random


@every_operator
@few_cases
def test_operations_are_counted(operator, case, samples):
    """By shapes alone, so that a step on fake tensors has as many."""
    assert operator.flops is not None
    counts = []
    for call in samples(operator, case):
        arguments = flat(operator, call)
        with FlopCounterMode(display=False) as counter:
            operator.definition(*arguments)
        shapes = [tuple(one.shape) if isinstance(one, Tensor) else one for one in arguments]
        assert counter.get_total_flops() == operator.flops(*shapes) >= 0
        counts.append(counter.get_total_flops())
    assert max(counts) > 0 or case.rows < 2 or case.taken == "none"


@pytest.mark.pairs
@pytest.mark.parametrize("operator", [one for one in OPERATORS.values() if one.native], ids=lambda one: one.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_place
@every_size
def test_what_the_library_does_in_one_call_is_what_it_does_step_by_step(operator, dtype, place, size, samples):
    for one in samples(operator, Case(*size, dtype, *place)):
        found = operator.native(*one.arguments, **one.named)
        if found is not NotImplemented:
            assert same(found, operator.function(*one.arguments, **one.named))

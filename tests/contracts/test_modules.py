"""The properties of converted modules: one test for each, over all modules of the table in module_cases.py.

A module that the library can convert and the table does not have fails the first tests. A property that a module does
not have is in ``WITHOUT``, with the reason.
"""

from __future__ import annotations

import copy
import functools
import importlib
import math
import pickle
import pkgutil
import weakref

import pytest
import torch
from cases import needs_triton
from compile_helpers import Graphs
from module_cases import MEMBERS, POINTWISE, TOKENS, WIDTH, converted_model, exact_model
from module_steps import (
    ROWS,
    SEQUENCES,
    assert_exact_parts,
    assert_near,
    assert_same,
    assert_unbiased,
    inputs,
    saved_bytes,
    step,
    weights_of,
)
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rmm_linear import activations, layers, revert
from rmm_linear.activations.pointwise import pointwise_function
from rmm_linear.backends import triton
from rmm_linear.config import OPERATIONS
from rmm_linear.layers.converted import _PAIRS, ConvertedModule
from rmm_linear.layers.linear import SketchedLayer
from rmm_linear.packing.pointwise import FUNCTIONS

for package in (activations, layers):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MASK = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [7], [12]])).long()
OF_TRANSFORMERS = ["attention roberta", "attention llama", "attention t5"]
OWN_CODE = ["attention own code", "activation own code", "linear own code", "dropout own code"]
# The property that modules do not have whose names begin so, and why.
WITHOUT = {
    ("attention roberta", "padding"): "it takes a mask of its own, as its model makes it: the whole models are tested",
    ("attention llama", "padding"): "it takes a mask of its own, as its model makes it: the whole models are tested",
    **{
        (name, "padding"): "what is saved has rows of padding too"
        for name in (*OWN_CODE, "convolution", "attention softmax")
    },
    ("attention own code", "shapes"): "transformers cannot reshape what is empty",
    ("attention own code llama", "widths"): "a rotary embedding needs an even width of heads",
    ("attention own code roberta", "without random numbers"): "it has dropout",
    ("attention own code t5", "without random numbers"): "it has dropout",
    **{(name, "shapes"): "transformers cannot reshape what is empty" for name in OF_TRANSFORMERS},
    **{
        (name, "without random numbers"): "it has a mask of dropout"
        for name in ("dropout", "gated t5", "attention dropout", "attention roberta", "attention t5 dropout")
    },
    ("attention t5", "reentrant"): "without gradients, PyTorch's own kernel is another one, with other last bits",
    ("Conv1D", "views"): "transformers' own takes no views",
    ("convolution", "views"): "its code follows the memory: tests/activations/test_convolution.py",
    ("attention llama", "widths"): "a rotary embedding needs an even width of heads",
    **{(name, "transforms"): "code around it reads what is mapped" for name in [*OF_TRANSFORMERS, "attention nn."]},
    **{
        (name, of): why
        for name in ("norm batch", "norm group", "norm instance")
        for of, why in (
            ("padding", "statistics have rows of padding too"),
            ("nan", "statistics are those of many rows"),
            ("fused", "no kernel makes its output"),
        )
    },
    ("norm batch", "shapes"): "PyTorch refuses one value for a channel",
    ("norm instance", "shapes"): "PyTorch refuses one value for a channel",
    ("pooling", "padding"): "what is saved has rows of padding too",
    ("activation own code", "fused"): "no kernel knows it",
    ("norm nemotron", "fused"): "how it rounds half types is not known",
    ("gated t5", "fused"): "its dropout draws another mask",
    ("experts", "shapes"): "those of transformers return a constant for no rows",
    ("experts", "compile"): "it divides compiled code",
    ("attention own code", "compile"): "it divides compiled code",
    ("gated t5", "compile"): "an operator draws the seed, in compiled code, before dropout draws its mask",
}


# Activations that differ in a table alone, and MLPs that differ in names: what the code around them does, one shows.
ALIKE = {f"activation {name}" for name in {*POINTWISE} - {"gelu", "quick_gelu", "relu", "relu_squared"}}
ALIKE |= {"gated qwen2", "gated mistral", "gated gemma", "gated phi3"}
OF_FUNCTIONS = ("exact", "unbiased", "bytes", "nan", "fused", "compile")


def members(of):
    """The modules of the table, without those that do not have a property, which are skipped with the reason."""
    for name in MEMBERS:
        reason = next((why for (begin, what), why in WITHOUT.items() if what == of and name.startswith(begin)), None)
        marks = [pytest.mark.thorough] if name in ALIKE and of not in OF_FUNCTIONS else []
        yield pytest.param(name, marks=[pytest.mark.skip(reason=reason)] if reason else marks, id=name)


def every_module(of):
    return pytest.mark.parametrize("name", members(of))


def is_made(model):
    """Whether weights are made of other parameters."""
    return any(map(is_parametrized, model.modules()))


def with_settings(of, settings, few=()):
    """Every module with every setting; with each of the ``few``, one of three, and the others where it is thorough."""
    for place, one in enumerate(members(of)):
        for setting in settings:
            left = setting in few and (place + few.index(setting)) % 3
            marks = [*one.marks, *([pytest.mark.thorough] if left else [])]
            yield pytest.param(*one.values, setting, marks=marks, id=f"{one.id}-{setting}")


def saving(choose):
    """Arguments of a checkpoint that saves what some operators make."""

    def policy(context, operator, *args, **named):
        return CheckpointPolicy.MUST_SAVE if choose(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": contexts}


FORMS = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "without random numbers": {"use_reentrant": False, "preserve_rng_state": False},
    "saves ours": saving(lambda operator: operator.namespace == "rmm_linear"),
    "saves nothing": saving(lambda operator: False),
}


# Which operators' results a checkpoint saves is a setting of PyTorch's, and not of a module.
SELECTIVE = ("without random numbers", "saves ours", "saves nothing")
in_checkpoints = pytest.mark.parametrize(
    ("name", "form"), [one for form in FORMS for one in with_settings(form, [form], SELECTIVE)]
)


# The table


def test_the_table_has_every_class_of_converted_modules():
    def classes(of):
        for one in of.__subclasses__():
            yield from [one, *classes(one)]

    made = {type(one) for name in MEMBERS for one in converted_model(name).modules()}
    bases = {base for one in made for base in one.__mro__}
    found = {one for one in classes(ConvertedModule) if one not in _PAIRS and one.__module__.startswith("rmm_linear.")}
    # Its logits are no tensor until they are read: tests/activations/test_lazy_logits.py.
    assert found - bases == {importlib.import_module("rmm_linear.activations.logits").ChunkedHead}
    assert {MEMBERS[name].operation for name in MEMBERS} == {*OPERATIONS} - {"logits"}
    assert all(any(name.startswith(begin) for name in MEMBERS) for begin, _ in WITHOUT)


def test_the_table_has_every_function():
    found = {pointwise_function(one) for name in MEMBERS for one in exact_model(name).modules()} - {None}
    assert {one.name for one in found} == set(FUNCTIONS)


# Properties


@pytest.mark.parametrize(("name", "dtype"), with_settings("exact", DTYPES, DTYPES[2:]))
def test_what_is_exact(name, dtype):
    """Output, random numbers and exact gradients in training; everything in eval mode and without gradients."""
    found, exact, x = converted_model(name, dtype=dtype), exact_model(name, dtype=dtype), inputs(dtype)
    one, other = step(found, x), step(exact, x)
    assert_exact_parts(name, one, other, dtype)
    assert torch.equal(one.state, other.state)
    assert all(map(torch.equal, found.buffers(), exact.buffers()))
    for mode in (torch.no_grad, torch.inference_mode):
        outputs = []
        for model in (found, exact):
            torch.manual_seed(0)
            with mode():
                outputs.append(model(x.detach()))
            assert torch.equal(model.state, other.state)
            assert torch.equal(torch.get_rng_state(), (one if model is found else other).after)
        assert torch.equal(*outputs)
    if isinstance(found.module, SketchedLayer):
        found.module.weight.requires_grad_(False)
        exact.module.weight.requires_grad_(False)
        one, other = step(found.eval(), x), step(exact.eval(), x)
        assert_exact_parts(name, one, other, dtype)
    else:
        assert_same(step(found.eval(), x), step(exact.eval(), x))


@every_module("unbiased")
def test_gradients_are_unbiased(name):
    found, exact, x = converted_model(name), exact_model(name), inputs()
    assert_unbiased(name, lambda seed: step(found, x, seed), lambda seed: step(exact, x, seed))


@every_module("bytes")
def test_bytes_are_the_formula_and_nothing_where_nothing_is_needed(name):
    member, x = MEMBERS[name], inputs()
    model, exact = (make(name).requires_grad_(not member.frozen) for make in (converted_model, exact_model))
    assert saved_bytes(model, x) == member.saved(ROWS, ROWS, WIDTH)
    given = []
    model.change = lambda x: given.append(weakref.ref(x := x * 1)) or x
    output = model(x)
    assert given[0]() is (output if "in place" in name else None)
    with torch.no_grad():
        assert saved_bytes(model, x) == 0
    is_layer = isinstance(model.module, SketchedLayer)  # which saves nothing in eval mode, and refuses its gradient
    assert saved_bytes(model.eval(), x) == (0 if is_layer else saved_bytes(exact.eval(), x))
    model.train().requires_grad_(False)
    assert saved_bytes(model, x.detach()) == 0
    assert not model(x.detach()).requires_grad
    # The gradient with respect to the input needs the weight alone, which is no parameter where it is made of some.
    if member.operation in ("linear", "convolution") and not is_made(model):
        assert saved_bytes(model, x) == 0


@every_module("padding")
def test_padding_is_left_out(name):
    """Of what is saved, and of the gradients, which stay unbiased; that it has none of its own is checked."""
    member, x = MEMBERS[name], inputs()
    found, exact = converted_model(name), exact_model(name)
    steps = [lambda seed, model=model: step(model, x, seed, MASK) for model in (found, exact)]
    assert_unbiased(name, *steps, draws=20, z=5)
    assert_exact_parts(name, steps[0](0), steps[1](0))
    left = steps[0](0).gradients["x"][MASK == 0]
    assert not left.any() or member.operation in ("linear", "attention")
    order = 8 * ROWS + 8 * (member.operation == "linear")  # all rows, the valid ones first; and how many are
    order += MASK.numel() * member.masked
    fresh = converted_model(name).requires_grad_(not member.frozen)
    assert saved_bytes(fresh, x, MASK) == member.saved(int(MASK.sum()), ROWS, WIDTH) + order
    loss = converted_model(name)(x, attention_mask=MASK).square().sum()
    with pytest.raises(RuntimeError, match=r"masked tokens of module.* carry a gradient.*mask_padding=False"):
        loss.backward()


@every_module("alone")
def test_a_gradient_is_the_same_whatever_else_is_asked_for(name):
    x = inputs()
    every = step(converted_model(name), x).gradients
    for one in every:
        model = converted_model(name)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(key == one)
        found = step(model, x if one == "x" else x.detach()).gradients
        assert found.keys() == {one}
        assert_near(found[one], every[one], 1e-6 if MEMBERS[name].frozen or one in MEMBERS[name].exact else 0)


@every_module("graph")
def test_what_is_done_with_the_graph(name):
    """Twice back is the same gradient again; a gradient of it is refused; output and input may be overwritten.

    PyTorch's own modules save the input, and refuse the last.
    """
    model, leaf = converted_model(name), inputs()
    expected = step(model, leaf).gradients
    leaves = [leaf, *model.parameters()]
    model.change = lambda x: x

    def same(output, y, **named):
        found = torch.autograd.grad(output, leaves, y, **named)
        return all(torch.equal(*pair) for pair in zip(found, expected.values(), strict=True))

    torch.manual_seed(0)
    x = leaf * 1
    output = model(x)
    y = weights_of(output)
    assert same(output, y, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"does not support double backward.*Use rmm_linear.revert\(model\)"):
        torch.autograd.grad(output, leaves, y, create_graph=True)
    output += 1
    output.mul_(2)
    if not MEMBERS[name].frozen and output.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        x.zero_()  # other layers of the module do need it
    assert same(output, y / 2)


@every_module("shapes")
def test_any_shape(name):
    """No sequences, no tokens, one token, one row without other dimensions; and odd widths."""
    found, exact = converted_model(name), exact_model(name)
    for shape in ((0, TOKENS), (2, 0), (1, 1), ()):
        if shape == () and MEMBERS[name].operation == "attention":
            continue
        x = torch.randn(*shape, WIDTH, requires_grad=True)
        one, other = step(found, x), step(exact, x)
        assert_exact_parts(name, one, other)
        assert [(of.dtype, of.shape) for of in one.gradients.values()] == [
            (of.dtype, of.shape) for of in other.gradients.values()
        ]
        assert all(torch.equal(of.isfinite(), other.gradients[key].isfinite()) for key, of in one.gradients.items())


@pytest.mark.diagonal
@every_module("widths")
@pytest.mark.parametrize("width", [12, 132])
def test_odd_widths(name, width):
    """A short group of columns, alone and after whole ones."""
    found, exact, x = converted_model(name, width), exact_model(name, width), inputs(width=width)
    assert_exact_parts(name, step(found, x), step(exact, x))
    if width > 64:
        assert_unbiased(name, lambda seed: step(found, x, seed), lambda seed: step(exact, x, seed), draws=20, z=5)


VIEWS = {
    "transposed": ((WIDTH, SEQUENCES, TOKENS), lambda x: x.movedim(0, -1)),
    "sliced": ((SEQUENCES, 2 * TOKENS, WIDTH + 3), lambda x: x[:, ::2, 1:-2]),
    "expanded": ((1, TOKENS, WIDTH), lambda x: x.expand(SEQUENCES, -1, -1)),
}


@every_module("views")
def test_strides_do_not_matter(name):
    model, exact = converted_model(name), exact_model(name)
    for title, (shape, view) in VIEWS.items():
        if title == "expanded" and "in place" in name:
            continue  # PyTorch's own refuses it
        x = torch.randn(shape).requires_grad_()
        model.change = exact.change = lambda x, view=view: view(x * 1)
        found = step(model, x)
        assert_exact_parts(name, found, step(exact, x))
        if MEMBERS[name].operation == "dropout" or "images" in name:
            continue  # its random numbers follow the strides
        model.change = lambda x, view=view: view(x * 1).contiguous()
        for key, gradient in step(model, x).gradients.items():
            if "key.bias" not in key:  # 0 but for rounding
                assert_near(found.gradients[key], gradient, 1e-5)


@pytest.mark.diagonal
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@every_module("autocast")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_does_what_it_does_to_the_module(name, dtype):
    """Outputs to the bit, gradients of the dtypes of their tensors, unbiased up to bfloat16's rounding."""
    found, exact, x = converted_model(name), exact_model(name), inputs(dtype)

    def run(model, seed):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, x, seed)

    assert_exact_parts(name, run(found, 0), run(exact, 0), torch.bfloat16)
    if dtype == torch.float32:
        assert_unbiased(name, lambda s: run(found, s), lambda s: run(exact, s), draws=20, z=5, room=2e-2)


@in_checkpoints
def test_a_checkpoint_changes_nothing(form, name):
    """Of a forward pass of the model, or of the module by itself; nor do random numbers that are drawn after it."""
    x, found, alone = inputs(), [], []
    for recomputes in (False, True):
        model = converted_model(name)
        forward = model.module.forward
        again = lambda x, *args, f=forward: checkpoint(lambda x: f(x * 1, *args), x, **FORMS[form])  # noqa: E731
        alone.append(step(model, x, run=again if recomputes else lambda x, f=forward: f(x * 1)))
        if recomputes:
            model.module.forward = again
        found.append(step(model, x))
    assert_same(*found)
    if form != "without random numbers":  # else a module by itself draws another seed
        assert_same(*alone)
        assert all(torch.equal(one.after, other.after) for one, other in (found, alone))


@every_module("copies")
def test_copies_pickles_and_reverted_modules(name):
    model, exact, x = converted_model(name), exact_model(name), inputs()
    expected = step(model, x)
    pickled = [] if is_made(model) else [pickle.loads(pickle.dumps(model))]  # PyTorch pickles nothing parametrized
    for other in (copy.deepcopy(model), *pickled):
        assert [type(one) for one in other.modules()] == [type(one) for one in model.modules()]
        assert_same(step(other, x), expected)
        assert not {one.data_ptr() for one in other.parameters()} & {one.data_ptr() for one in model.parameters()}
    assert model.state_dict().keys() == exact.state_dict().keys()
    revert(model)
    exact.state = None
    for one, other in zip(model.modules(), exact.modules(), strict=True):
        assert type_before_parametrizations(one) is type_before_parametrizations(other)
        assert vars(one).keys() == vars(other).keys()
        assert len(one._forward_hooks) == len(other._forward_hooks)
    assert_same(step(model, x), step(exact, x))


@every_module("nan")
def test_nan_stays_in_its_row(name):
    """In the rows of the gradient with respect to the input; of an attention, in its sequence.

    Of an activation whose derivative is rounded, the whole gradient is NaN: its codes have no room for one.
    """
    model, x, row = converted_model(name), inputs(), (1, 3)
    expected = step(model, x)
    with torch.no_grad():
        x[row] = math.nan
    found, others = step(model, x), torch.ones(SEQUENCES, TOKENS, dtype=torch.bool)
    others[row if MEMBERS[name].operation != "attention" else row[0]] = False
    assert torch.equal(found.output[others], expected.output[others])
    function = getattr(model.module, "rmm_function", None)
    if function is not None and function.is_bounded and not function.is_exact:
        assert found.gradients["x"].isnan().all()
    else:
        assert torch.equal(found.gradients["x"][others], expected.gradients["x"][others])


@every_module("seeds")
def test_seeds_decide_and_nothing_else_does(name):
    """Neither the default device nor the default dtype."""
    model, x = converted_model(name), inputs()
    first, other = step(model, x, 1), step(model, x, 2)
    assert_same(step(converted_model(name), x, 1), first)
    for key, gradient in first.gradients.items():
        if MEMBERS[name].near or key not in MEMBERS[name].exact:
            assert not torch.equal(gradient, other.gradients[key]), key
    before = torch.get_default_dtype()
    for default in ("meta", torch.float64, torch.float16):
        try:
            torch.set_default_dtype(default) if isinstance(default, torch.dtype) else torch.set_default_device(default)
            found = step(model, x, 1)
        finally:
            torch.set_default_dtype(before)
            torch.set_default_device(None)
        assert_same(found, first)


@every_module("transforms")
def test_what_has_no_backward_pass_of_autograd_is_refused(name):
    model, x = converted_model(name), inputs().detach()
    for run in (
        lambda: torch.func.vmap(model)(x.unsqueeze(0)),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.jit.trace(model, (x,)),
        lambda: torch.jit.script(model.module),
    ):
        with pytest.raises(RuntimeError, match=r"Converted modules work with autograd's .* rmm_linear.revert"):
            run()


# The other gated modules and norms differ in what they are recognized by, and call the same kernels.
ON_KERNELS = ("gated llama", "gated functional", "norm layer", "norm rms", "norm gemma")


def fused_members():
    """Modules whose outputs kernels make; one dtype for each."""
    fused = [one for one in members("fused") if MEMBERS[one.values[0]].operation in ("activation", "norm")]
    fused = [one for one in fused if "bits" not in one.id and "in place" not in one.id]
    for place, one in enumerate(fused):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[place % 3]
        left = one.id.startswith(("gated", "norm")) and one.id not in ON_KERNELS
        marks = [*one.marks, *([pytest.mark.thorough] if left else [])]
        yield pytest.param(*one.values, dtype, marks=marks, id=f"{one.id}-{dtype}")


@pytest.fixture
def kernels_that_make_outputs(monkeypatch):
    monkeypatch.setenv("RMM_BACKEND", "triton")
    made, kernels = [], triton.kernels()
    for name in ("activate_and_pack", "square_and_pack", "gate_and_pack", "normalize_and_pack"):
        run = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, run=run, name=name: (made.append(name), run(*args))[1])
    return made


def ulps(found, expected, count):
    """Whether outputs differ by at most so many last bits, of numbers below 1 those of 1."""
    size = torch.finfo(found.dtype).eps * expected.double().abs().clamp(min=1)
    return found.dtype == expected.dtype and bool(((found.double() - expected.double()).abs() <= count * size).all())


@pytest.mark.one_of(2)
@needs_triton
@pytest.mark.parametrize(("name", "dtype"), fused_members())
def test_fused_outputs_differ_in_last_bits_and_gradients_do_not(name, dtype, kernels_that_make_outputs):
    """With padding too; but for the layer that reads it. Without gradients, the module makes its own output."""
    x, found = inputs(dtype, tokens=4), []
    mask = torch.ones(SEQUENCES, 4, dtype=torch.int64)
    mask[1, 2:] = 0
    for fused in (False, True):
        model = converted_model(name, dtype=dtype, fused=fused)
        found.append([step(model, x), step(model, x, mask=mask)])
    function = getattr(model.module, "rmm_function", None)
    is_bit = function is not None and function.is_exact  # which are made so in any case, but with padding
    assert len(kernels_that_make_outputs) == 2 + is_bit
    room = 16 if "norm" in name and dtype == torch.float32 else 8  # sums of 96 numbers
    for one, other in zip(*found, strict=True):
        assert ulps(other.output, one.output, room)
        for key, gradient in one.gradients.items():
            near = 4 * torch.finfo(dtype).eps * (key in MEMBERS[name].exact)
            assert (other.gradients[key] - gradient).norm() <= near * gradient.norm(), key
    outputs = []
    for one in (model, exact_model(name, dtype=dtype)):
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(one(x))
    assert torch.equal(*outputs)
    assert len(kernels_that_make_outputs) == 2 + is_bit


def compiled_members():
    """One of each mechanism that a whole model in one graph has not, and the others at length.

    tests/integration/test_compiled_models.py compiles a model with the rest: linears, an activation, dropout and
    attention.
    """
    for one in members("compile"):
        marks = [
            *one.marks,
            *([] if one.id in ("linear countsketch", "norm layer", "gated llama") else [pytest.mark.stack]),
        ]
        yield pytest.param(*one.values, marks=marks, id=one.id)


@pytest.mark.parametrize("name", compiled_members())
def test_compiled_code_is_one_graph_for_all_lengths(name):
    """With seeds of its own in every step.

    Modules in place, elementwise code, and callers of PyTorch's attention stay exact in it, and products of two
    activations, so that a scale's alone is coded.
    """
    torch._dynamo.reset()
    model, exact = converted_model(name), exact_model(name)
    graphs = Graphs(), Graphs()
    run, run_exact = graphs[0].compile(model), graphs[1].compile(exact)
    for tokens in (TOKENS, TOKENS - 6, TOKENS - 3):
        x = inputs(tokens=tokens)
        found, again, other = (step(model, x, seed, run=run) for seed in (0, 0, 1))
        expected, another = (step(exact, x, seed, run=run_exact) for seed in (0, 1))
        assert_exact_parts(name, found, expected)
        assert_same(found, again)
        calls_pytorch = name.startswith("attention") and not name.startswith((*OF_TRANSFORMERS, "attention softmax"))
        is_scale = name == "activation own code scale"
        is_elementwise = name.startswith("activation own code") and not is_scale
        is_exact = name.endswith("in place") or calls_pytorch or is_elementwise
        exact_too = ("x",) if is_scale else ()
        for key, gradient in found.gradients.items():
            difference = gradient - expected.gradients[key], other.gradients[key] - another.gradients[key]
            is_near = max(float(one.norm()) for one in difference) < 1e-5 * float(gradient.norm())
            assert is_near == (is_exact or key in (*MEMBERS[name].exact, *exact_too)), key
            assert is_near or not torch.equal(*difference), key
    # Forward and backward, for the first length and for all others, unless the module itself needs more.
    assert 4 <= len(graphs[0].counts) == max(4, len(graphs[1].counts))
    if not is_exact:
        steps = [lambda s, m=m, f=f: step(m, x, s, run=f) for m, f in ((model, run), (exact, run_exact))]
        assert_unbiased(name, *steps, draws=20, z=5, exact_too=exact_too)
    torch._dynamo.reset()

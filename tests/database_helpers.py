"""PyTorch's own databases of modules and operators, whose inputs are samples for what the library converts.

They are internal to PyTorch, and importing them takes seconds and changes settings for its own tests: so they are
imported when a test asks for them, and the settings are put back.
"""

import functools
import os
import re
import warnings
from typing import NamedTuple

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rmm_linear import RMMConfig, convert

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Everything is coded, in the widest codes.
WIDE = RMMConfig(bits=8, activation_bits=8, norm_bits=8, attention_bits=8, min_rows=1)
# An element of 8 bits is off by less than 2⁻⁷ of the largest of its group, and a gradient by twice that at most.
NEAR = 2.0**-6


@functools.cache
def _databases():
    profile, environment = settings.get_current_profile_name(), dict(os.environ)
    is_open = torch.backends.__allow_nonbracketed_mutation_flag
    calls = [(kind, kind.__call__) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)]
    try:
        with warnings.catch_warnings():
            from torch.testing._internal.common_methods_invocations import op_db
            from torch.testing._internal.common_modules import module_db
    except ImportError as error:  # of expecttest, or of a version of PyTorch that has them elsewhere
        return str(error)
    finally:
        torch.backends.__allow_nonbracketed_mutation_flag = is_open
        settings.load_profile(profile)
        for kind, call in calls:
            kind.__call__ = call
        for name in set(os.environ) - set(environment):
            del os.environ[name]
    return module_db, op_db


def databases():
    """Return the entries of modules and of operators; the test is skipped where there are none."""
    found = _databases()
    if isinstance(found, str):
        pytest.skip(f"PyTorch's databases cannot be imported: {found}")
    return found


def spread(samples, most):
    """Return at most so many samples, from the first on at equal distances."""
    return samples[:: -(-len(samples) // most) or 1]


def converted(module):
    """Convert a module as the only one of a model; None if nothing of it can be."""
    model = nn.ModuleDict({"module": module})
    try:
        convert(model, WIDE)
    except ValueError:
        return None
    return model["module"]


class Run(NamedTuple):
    """What a call gave: tensors, gradients by name, and the gradient of the outputs; or what it raised."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    size: float = 0.0  # of the gradient of the outputs
    largest: float = 0.0  # of what is differentiated by
    error: tuple[type, str] | None = None


def run(module, args, kwargs=None, is_trained=True, view=lambda tensor: tensor):
    """Call a module with views of new leaves, and differentiate: by arguments, and where asked for by parameters."""
    leaves = {}

    def given(tensor):
        leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        leaves.update({str(len(leaves)): leaf} if leaf.requires_grad else {})
        return view(leaf)

    args, kwargs = tree_map_only(torch.Tensor, given, (args, kwargs or {}))
    leaves |= {name: one for name, one in module.named_parameters() if is_trained and one.requires_grad}
    torch.default_generator.manual_seed(1)
    try:
        outputs = [one for one in tree_leaves(module(*args, **kwargs)) if isinstance(one, torch.Tensor)]
        ends, numbers = [one for one in outputs if one.requires_grad], torch.Generator().manual_seed(2)
        y = [torch.randn(one.shape, generator=numbers, dtype=torch.float32).to(one) for one in ends]
        found = torch.autograd.grad(ends, list(leaves.values()), y, allow_unused=True) if ends and leaves else ()
    except Exception as error:
        message = re.sub(r"\w+Backward\d*", "Backward", str(error))  # names of nodes of the graph
        return Run([], {}, error=(type(error), message))
    size = sum(float(one.abs().double().square().sum()) for one in y) ** 0.5
    largest = max((float(one.detach().abs().max()) for one in leaves.values() if one.numel()), default=0.0)
    return Run(outputs, dict(zip(leaves, found, strict=bool(found))), size, largest)


def differences(found, expected, near=0.0):
    """Say how one call differs from another: outputs and errors by anything, gradients by more than ``near``.

    Relative to the gradient, or to that of the outputs: derivatives that are far below 1 have codes of that range.
    Sums over n elements of a half type have its error √n times. Derivatives by the only element of a parameter may be
    as large as the inputs, and so their errors are.
    """
    if found.error != expected.error:
        yield f"raises {found.error}, not {expected.error}"
    elif [how(one) for one in found.outputs] != [how(one) for one in expected.outputs]:
        yield "other outputs"
    elif not all(map(same, found.outputs, expected.outputs)):
        yield "other numbers in outputs"
    for name, exact in expected.gradients.items() if not found.error else ():
        gradient = found.gradients[name]
        if exact is None or gradient is None:
            if exact is not gradient:
                yield f"gradient of {name}: {'none' if gradient is None else 'one'}"
        elif how(gradient) != how(exact):
            yield f"gradient of {name}: {how(gradient)}, not {how(exact)}"
        elif not exact.isfinite().all():
            if (not near and not same(gradient, exact)) or gradient[~exact.isfinite()].isfinite().any():
                yield f"gradient of {name}: other elements are not finite"
        elif exact.numel():
            size = max(expected.size, float(exact.abs().double().norm()))
            rows = max(one.numel() for one in expected.outputs) / exact.numel()
            room = near + 2 * torch.finfo(exact.dtype).eps * max(1, rows) ** 0.5
            size *= max(1.0, expected.largest) if exact.numel() == 1 < rows else 1.0
            error = float((gradient - exact).abs().double().norm())
            if not error <= room * size:
                yield f"gradient of {name} is off by {error / size:.3g}, more than {room:.3g}"


def how(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.requires_grad


def same(found, expected):
    found, expected = found.detach().to_dense(), expected.detach().to_dense()
    return torch.equal(found.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(found.isnan(), expected.isnan())

"""What the tests of pointwise stand-ins share: functions and widths, inputs, and what a gradient must stay within."""

import torch

from rmm_linear.packing.pointwise import FUNCTIONS, Pointwise

PARAMETERS = {"elu": (1.7,), "leaky_relu": (0.1,), "hardtanh": (-0.5, 6.0)}  # ELU's with a jump of its derivative at 0
FOUND = [Pointwise(name, PARAMETERS.get(name, ())) for name in FUNCTIONS]
EXACT = [function for function in FOUND if function.is_exact]
ROUNDED = [function for function in FOUND if function.is_bounded and not function.is_exact]
WIDTHS = [(function, bits) for function in FOUND for bits in (8, 4, 2, 1) if function.bits(bits) == bits]
SEED = torch.tensor([7])


def randn(*shape, seed=1, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def gradient_of(run, x, y):
    """The output, and the gradient by x for the gradient y by the output; x is not a leaf, as inside of a model."""
    x = x.clone().requires_grad_()
    output = run(x * 1)
    output.backward(y)
    return output.detach(), x.grad


def is_within_half_a_step(found, x, y, function, bits):
    """Whether a gradient is one of codes and the seed that belongs to them: another seed misses it almost surely.

    The room is for what float32, or the half type, leaves of ĝ and of the product: three roundings each.
    """
    exact = y.double() * function.derivative(x.double())
    room = 3 * torch.finfo(found.dtype).eps * (exact.abs() + y.double().abs()) + 1e-4 * y.double().abs()
    return bool(((found.double() - exact).abs() <= y.double().abs() * function.step(bits) / 2 + room).all())

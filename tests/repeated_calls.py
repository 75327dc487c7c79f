"""Call operators with a driver that launches nothing, and print those whose repeated launches are others.

A program of its own, because Triton decides when it is imported whether it compiles or interprets.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels" / "tests"))
from launch_kernels import LAUNCHED, Driver

from rmm_linear.backends.triton import kernels
from rmm_linear.ops import attention, dispatch, masks, norms, save
from rmm_linear.ops import triton as adapted
from rmm_linear.ops.derivatives import activate_and_pack, apply_derivative, pack_derivative
from rmm_linear.ops.repeat import Recording
from rmm_linear.spec import SaveSpec

SEEDS = 2**40, 5, -(2**63)


def described(values: tuple[Any, ...], known: list[Tensor]) -> list[str]:
    """Return the arguments of a launch, addresses by the tensor that they are in, and others by their order."""
    found, others = [], []
    for value in values:
        value = value.data_ptr() if isinstance(value, Tensor) else value
        inside = [
            f"{i}+{value - one.data_ptr()}"
            for i, one in enumerate(known)
            if type(value) is int and 0 <= value - one.data_ptr() < max(1, one.untyped_storage().nbytes())
        ]
        if not inside and type(value) is int and value > 2**42 and value not in SEEDS:
            others += [] if value in others else [value]
            inside = [f"other {others.index(value)}"]
        found.append(inside[0] if inside else str(value))
    return found


def launches(run: Any, arguments: tuple[Any, ...]) -> list[list[str]]:
    """Return what a call launches."""
    LAUNCHED.clear()
    made = run(*arguments)
    known = [one for one in (*arguments, *([made] if isinstance(made, Tensor) else made)) if isinstance(one, Tensor)]
    return [described((*one[:6], *one[9:]), known) for one in LAUNCHED]


def calls(rows: int, index: Tensor | None) -> list[tuple[str, Any, list[tuple[Any, ...]]]]:
    """Every function whose calls are repeated, with arguments that differ in seeds alone."""
    x, y, gamma = torch.randn(rows, 70), torch.randn(rows, 70), torch.ones(70)
    how, fused = (2, 1e-5, True), (2, 1e-5, False, torch.float32, torch.float32)
    stored = norms.pack_norm.function(x, index, 1, *how)
    spec = SaveSpec("countsketch", rows, None, 3)
    codes, scales, seed = save.save.function(x, spec, None, 1)
    gelu = "gelu", (), 4
    derivative = pack_derivative.function(x, index, 1, *gelu)
    q, k, v = (torch.randn(2, rows, 2, 40).transpose(1, 2) for _ in range(3))
    mean, bits = k.mean(2).flatten(1), (4, 4, 4)
    packed = attention._pack(q, k, v, mean, None, None, 1, bits)
    return [
        ("norm", norms.pack_norm.repeated, [(x, index, seed, *how) for seed in SEEDS]),
        (
            "norm and output",
            norms.normalize_and_pack.repeated,
            [
                (x.unflatten(0, (-1, rows // 4 or 1) if rows % 4 == 0 else (3, -1)), gamma, None, None, seed, *fused)
                for seed in SEEDS
            ],
        ),
        ("gradients", norms.norm_backward.repeated, [(y, stored, gamma, index, 2, True, x.dtype, True, x.dtype)] * 3),
        ("keep", save.save.repeated, [(x, spec, None, seed) for seed in SEEDS]),
        ("decode", adapted._DECODED, [(codes, scales, seed, 3, 70, x.dtype)] * 3),
        ("mask", masks.pack_mask.repeated, [(x > 0, index)] * 3),
        ("masked", masks.apply_mask.repeated, [(y, masks.pack_mask.function(x, index), 1.5, index)] * 3),
        ("derivative", pack_derivative.repeated, [(x, index, seed, *gelu) for seed in SEEDS]),
        ("of activation", apply_derivative.repeated, [(y, derivative, index, *gelu)] * 3),
        ("activation", activate_and_pack.repeated, [(x, None, seed, *gelu) for seed in SEEDS]),
        ("attention", attention._PACKED, [(q, k, v, mean, None, None, seed, bits) for seed in SEEDS]),
        ("rows", attention._UNPACKED, [(packed, 2 * rows, 2 * rows, (80, 80, 80), bits, x.dtype)] * 3),
    ]


def main() -> None:
    """Print the functions that were tried, and after a colon those whose calls are not repeated as they were."""
    triton.runtime.driver.set_active(Driver())
    module = sys.modules[sys.modules[kernels().pack.__module__].launch.__module__]
    tried, wrong = [], []
    with ExitStack() as stack, torch.no_grad():
        for patch in (
            mock.patch.object(module, "_on", return_value=ExitStack()),
            mock.patch.object(module, "_index", return_value=0),
            mock.patch.object(module, "_is_asynchronous", return_value=True),
            mock.patch.object(module, "can_launch", return_value=True),
            mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
            mock.patch.object(dispatch, "backends_of", return_value=("triton", "plain")),
            mock.patch.object(dispatch, "was_tried", return_value=True),
            mock.patch.object(Tensor, "is_cpu", False),
            mock.patch.object(Tensor, "is_cuda", True),
        ):
            stack.enter_context(patch)
        for rows, index in ((33, None), (64, torch.arange(0, 64, 2))):
            for name, repeated, every in calls(rows, index):
                before = len(repeated._known)
                for _ in range(2):  # the first call counts, the second is noted
                    launches(repeated, every[0])
                is_known = all(type(one) is Recording for one in [*repeated._known.values()][before:])
                same = [launches(repeated, one) == launches(repeated.function, one) for one in every]
                tried.append(name)
                wrong += [] if is_known and all(same) else [f"{name} {rows} {index is None} {is_known} {same}"]
    print(f"{len(tried)}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()

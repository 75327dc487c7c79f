"""Launch kernels twice with a driver that runs nothing, and print whether both launches had the same arguments.

A program of its own, because Triton decides when it is imported whether it compiles or interprets.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from rmm_linear.backends.triton import kernels

LAUNCHED: list[tuple[Any, ...]] = []
COMPILED: list[str] = []
SEED = torch.tensor([3**30])


class Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        COMPILED.append(metadata.name)

    def __call__(self, *arguments: Any) -> None:
        LAUNCHED.append(arguments)


class Driver(DriverBase):
    """Compiles for sm_90 and loads nothing."""

    def __init__(self) -> None:
        sizes = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
        self.utils = types.SimpleNamespace(
            load_binary=lambda *_: (1, 2, 100, 0, 1024),
            get_device_properties=lambda _: sizes,
            unload_module=lambda *_: None,
        )
        self.launcher_cls, self.binary_ext = Launcher, "cubin"
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device=0: 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    def get_benchmarker(self) -> Any: ...

    def get_device_interface(self) -> Any:
        return torch.cpu

    def set_current_device(self, device: int) -> None: ...


@functools.cache
def numbers(tokens: int) -> torch.Tensor:
    """A matrix, at the same address every time."""
    return torch.randn(tokens, 776, dtype=torch.bfloat16)


def calls(tokens: int) -> None:
    """Pack and unpack a matrix, and a slice of it whose rows begin anywhere, with a seed in its place."""
    x, seed = numbers(tokens), SEED
    for matrix in (x[:, :768], x[:, 1:769]):
        codes, scales = kernels().pack(matrix, 3, seed)
        kernels().unpack(codes, scales, seed, 3, 768, torch.bfloat16)


def seeds(*values: int | None) -> None:
    """Pack a matrix with seeds that the kernel writes to their place; None for one that is there."""
    x, place = numbers(512)[:, :768], torch.zeros(2, dtype=torch.int64)
    for number, value in enumerate(values):
        kernels().pack(x, 3, place if value is None else (place[: 1 + number % 2], (value,)))


def described(arguments: tuple[Any, ...]) -> list[str]:
    """Return grid, stream, kernel and arguments, without what hooks alone see; tensors by their addresses."""
    own = (*arguments[:6], *arguments[9:])
    return [str(one.data_ptr() if isinstance(one, torch.Tensor) else one) for one in own]


def main() -> None:
    """Print the launches without and with what is known from them, and how often Triton was asked."""
    triton.runtime.driver.set_active(Driver())
    launch = sys.modules[kernels().pack.__module__].launch
    module = sys.modules[launch.__module__]
    asked = mock.Mock(side_effect=lambda device: contextlib.nullcontext())
    with (
        mock.patch.object(module, "_on", asked),
        mock.patch.object(module, "_index", return_value=0),
        mock.patch.object(torch, "empty", functools.cache(torch.empty)),
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        found = []
        for tokens in (512, 512, 384):
            before = asked.call_count
            LAUNCHED.clear()
            calls(tokens)
            found.append(([described(one) for one in LAUNCHED], asked.call_count - before))
        seeds(None)  # as in a graph that is captured
        before, known = asked.call_count, len(COMPILED)
        seeds(2**40, -(2**40), 2**63 - 1)
        large = asked.call_count - before
        seeds(5, 1, -7, 2**31, -(2**63))
        variants = len(COMPILED) - known
    (first, slow), (second, unaligned), (_, other) = found
    print(first == second, len(first), slow, unaligned, other, large, variants)


if __name__ == "__main__":
    main()

"""The formulas of bytes per element against the tensors that kernels are launched with."""

import sys

import pytest
import torch
from torch import Tensor

if sys.platform != "linux":  # where the test extra has Triton, and a failing import of it is a failure
    pytest.skip("Triton has no build for this platform", allow_module_level=True)

from compile_kernels import cases
from rmm_kernels_moved import COLUMNS, moved, value

from rmm_linear.backends.triton import kernels

ROWS, KEPT = 1920, 192


class Launches:
    """Stands in for a kernel: keeps the tensors of its launches and runs nothing."""

    def __init__(self):
        self.tensors = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.tensors.extend(a for a in arguments if isinstance(a, Tensor))


def matrix(dtype):
    return torch.zeros(ROWS, COLUMNS, dtype=dtype)


SEED = torch.zeros(1, dtype=torch.int64)
ORDER = {"order": torch.arange(ROWS), "count": torch.tensor([ROWS])}
SAMPLE = {"index": torch.arange(KEPT, dtype=torch.int32), "scale": torch.ones(KEPT)}
HALF, SINGLE = torch.bfloat16, torch.float32


def _packed(bits):
    return [
        torch.zeros(ROWS, COLUMNS * bits // 8, dtype=torch.uint8),
        torch.zeros(ROWS, COLUMNS // 64, dtype=torch.uint8),
    ]


IMAGES, WHOLE = matrix(HALF).view(1, ROWS, COLUMNS, 1), torch.zeros(2 * ROWS, 2 * COLUMNS, dtype=HALF)
RSTD, GAMMA = torch.zeros(ROWS), torch.zeros(COLUMNS)
# What calls a kernel as a variant of it was compiled.
LAUNCHES = {
    "sparse_sketch masked *bf16": lambda make: make.sparse_sketch(matrix(HALF), SEED, KEPT, **ORDER),
    "sparse_sketch packed": lambda make: make.sparse_sketch(matrix(HALF), SEED, KEPT, bits=4),
    "dense_sketch 1 0 *fp32": lambda make: make.dense_sketch(matrix(SINGLE), SEED, "rademacher", ROWS, KEPT),
    "dense_sketch 0 4 *fp32 masked": lambda make: make.dense_sketch(
        matrix(SINGLE), SEED, "gaussian", ROWS, KEPT, bits=4, **ORDER
    ),
    "row_norms": lambda make: make.row_norms(matrix(HALF)),
    "pack 4 *fp32": lambda make: make.pack(matrix(SINGLE), 4, SEED),
    "unpack 4 *bf16": lambda make: make.unpack(*_packed(4), SEED, 4, COLUMNS, HALF),
    "encode_normal 1.6 *bf16": lambda make: make.encode_normal(matrix(HALF), 1.6, SEED),
    "decode_normal 2 *bf16": lambda make: make.decode_normal(
        torch.zeros(ROWS, COLUMNS // 4, dtype=torch.uint8),
        torch.zeros(ROWS, COLUMNS // 128, dtype=torch.uint8),
        SEED,
        2,
        COLUMNS,
        HALF,
    ),
    "random_keys": lambda make: make.random_keys(SEED, ROWS),
    "row_statistics 3 *bf16": lambda make: make.pack_norm(matrix(HALF), 3, SEED, 1e-5),
    "pack_norm 4 *fp32 RMS": lambda make: make.pack_norm(matrix(SINGLE), 4, SEED, 1e-5, False),
    "pack_norm 2 *bf16 index": lambda make: make.pack_norm(matrix(HALF), 2, SEED, 1e-5, True, torch.arange(ROWS)),
    "norm_sums 4 *fp32 RMS": lambda make: make.norm_gradients(
        matrix(SINGLE), *_packed(4), RSTD, 4, SEED, centered=False, sums=False
    ),
    "norm_totals 4 *fp32 RMS": lambda make: make.norm_gradients(
        matrix(SINGLE), *_packed(4), RSTD, 4, SEED, centered=False, sums=False
    ),
    "norm_backward 2 *bf16 index": lambda make: make.norm_gradients(
        matrix(HALF), *_packed(2), RSTD, 2, SEED, GAMMA, index=torch.arange(ROWS)
    ),
    "pack_channels 3 *bf16": lambda make: make.pack_channels(IMAGES, 3, SEED, 1e-5, 0, (ROWS, COLUMNS)),
    "channel_statistics 3 *bf16": lambda make: make.pack_channels(IMAGES, 3, SEED, 1e-5, 0, (ROWS, COLUMNS)),
    "channel_sums 3 *bf16": lambda make: make.channel_gradients(
        IMAGES, *_packed(3), GAMMA, 3, SEED, GAMMA, 0, (ROWS, COLUMNS)
    ),
    "channel_backward 3 *bf16": lambda make: make.channel_gradients(
        IMAGES, *_packed(3), GAMMA, 3, SEED, GAMMA, 0, (ROWS, COLUMNS)
    ),
    "max_pool *bf16": lambda make: make.max_pool(WHOLE, (ROWS, COLUMNS), ((3, 3), (2, 2), (1, 1), (1, 1)), 4, False),
    "max_pool_backward *bf16": lambda make: make.max_pool_backward(
        matrix(HALF)[::2, : COLUMNS // 2].contiguous(),
        torch.zeros(4, ROWS * COLUMNS // 32, dtype=torch.uint8),
        (ROWS, COLUMNS),
        ((3, 3), (2, 2), (1, 1), (1, 1)),
        False,
    ),
    "pack_derivative mish 2 *bf16": lambda make: make.pack_derivative(
        matrix(HALF), _packed(2)[0], "mish", (), (0.0, 1.0), 2, SEED
    ),
    "apply_derivative elu 1 *bf16": lambda make: make.apply_derivative(
        matrix(HALF), _packed(1)[0], "elu", (1.0,), (0.0, 1.0), 1, SEED
    ),
    "pack_mask *u8": lambda make: make.pack_mask(matrix(HALF) > 0),
    "apply_mask *bf16": lambda make: make.apply_mask(matrix(HALF), _packed(1)[0], 2.0),
    "dropout *bf16": lambda make: make.dropout(matrix(HALF), SEED, 0.1),
    "pack_gated 2 4 *bf16": lambda make: make.pack_gated(matrix(HALF), matrix(HALF), SEED, "silu", 4),
    "apply_gated 2 4 *bf16": lambda make: make.apply_gated(matrix(HALF), SEED, [_packed(4), _packed(4)], 4),
    "activate silu 4 *bf16": lambda make: make.activate_and_pack(
        matrix(HALF), _packed(4)[0], "silu", (), (0.0, 1.0), 4, SEED
    ),
    "square 4 *bf16": lambda make: make.square_and_pack(matrix(HALF), 4, SEED),
    "normalize 2 *bf16 True": lambda make: make.normalize_and_pack(
        matrix(HALF), GAMMA, GAMMA, (SINGLE, HALF), 2, SEED, 1e-5, index=torch.arange(ROWS)
    ),
    "gate 2 4 *bf16": lambda make: make.gate_and_pack(matrix(HALF), matrix(HALF), SEED, "silu", 4),
}
VARIANTS = {name: (kernel, dtype, constants) for name, kernel, dtype, constants in cases()}


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_bytes_of_a_formula_are_those_of_what_is_launched(name, monkeypatch):
    kernel, dtype, constants = VARIANTS[name]
    launches, others = Launches(), Launches()
    make = kernels()
    modules = [module for key, module in sys.modules.items() if key.startswith("rmm_linear.kernels.")]
    for module in modules:
        for key, found in list(vars(module).items()):
            if key.endswith("_kernel"):
                monkeypatch.setattr(module, key, launches if found is kernel else others)
    LAUNCHES[name](make)
    found = sum(tensor.nbytes for tensor in launches.tensors) / (ROWS * COLUMNS)
    # What is read once for a whole matrix is not in the formula: some kilobytes of these 8 million elements.
    assert found == pytest.approx(value(moved(name, dtype, constants)), rel=0.002)


def test_gathered_rows_are_read_alone():
    """Of a launch the whole matrix is an argument; the formula has the rows of the index, in and out."""
    _, dtype, constants = VARIANTS["sparse_sketch gathered *bf16"]
    rows = 0.1 * (2 + 2) + 0.1 * (SAMPLE["index"].element_size() + SAMPLE["scale"].element_size()) / COLUMNS
    assert value(moved("sparse_sketch gathered *bf16", dtype, constants)) == pytest.approx(rows)


def test_every_variant_has_a_formula_and_another_kernel_is_refused():
    for name, (_, dtype, constants) in VARIANTS.items():
        assert 0 < value(moved(name, dtype, constants)) < 21, name
    with pytest.raises(ValueError, match=r"must have a formula in .*, got 'new'\. Add its line"):
        moved("new kernel", "*bf16", {})

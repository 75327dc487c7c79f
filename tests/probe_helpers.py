"""What the tests of the probe share: a rough sketch, the X and Y of a step, and rows computed by hand."""

import pytest
import torch
from helpers import token_ids
from torch.multiprocessing.reductions import StorageWeakRef

from rmm_linear.variance import GradientProbe, sgd_variance, sketch_variance


def padded_batch(batch=4, length=20):
    ids = token_ids(batch, length)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, length - 3 * row :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


def recorded(model, run):
    """X and Y of every call of every layer during ``run()``, in order."""
    calls, handles = {}, []

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            calls.setdefault(name, []).append((args[0].detach().flatten(0, -2).clone(), output))

        return hook

    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear", "Conv1D", "RMMLinear", "RMMConv1D"):
            handles.append(module.register_forward_hook(keep(name)))
    run()
    for handle in handles:
        handle.remove()
    return {name: [(x, out.grad.flatten(0, -2)) for x, out in found] for name, found in calls.items()}


def watched(module):
    """Weak references to the storages of all inputs that a module gets."""
    alive = []
    module.register_forward_pre_hook(lambda module, args: alive.append(StorageWeakRef(args[0].untyped_storage())))
    return alive


def rows_of(model, run, **options):
    """Rows of a probe of one pass."""
    with GradientProbe(model, every=1, **options) as probe:
        run(model)
    return probe.rows


def probed(model, run, **options):
    """Rows of a probe of one pass, and X and Y of every call of every layer."""
    seen = {}
    rows = rows_of(model, lambda model: seen.update(recorded(model, run)), **options)
    return rows, seen


def by_hand(x, y, *, config, samples, mask=None, bits=None):
    """α, D²_SGD, D²_sketch, K."""
    x, y = x.double(), y.double()
    g = torch.einsum("ni,no->io", x, y).square().sum()
    alpha = g / (x.square().sum() * y.square().sum())
    sgd = sgd_variance(x, y, samples=samples)
    rows = max(config.min_rows, round(config.ratio * len(x)))
    shape = {"kind": config.kind, "rows": rows, "bits": bits, "block": config.block}
    return float(alpha), float(sgd), float(sketch_variance(x, y, **shape, mask=mask, draws=1)), rows


def values(row):
    return row.alpha, row.sgd_variance, row.sketch_variance, row.noise


def close(row, alpha, sgd, sketched, rtol=1e-4):
    assert row.alpha == pytest.approx(alpha, rel=rtol)
    assert row.sgd_variance == pytest.approx(sgd, rel=rtol)
    assert row.sketch_variance == pytest.approx(sketched, rel=rtol)
    assert row.noise == pytest.approx(sketched / sgd, rel=rtol)


def same(first, second, rtol=1e-4):
    assert [(r.step, r.module, r.kind, r.rows, r.bits, r.tokens) for r in first] == [
        (r.step, r.module, r.kind, r.rows, r.bits, r.tokens) for r in second
    ]
    for one, other in zip(first, second, strict=True):
        assert values(one) == pytest.approx(values(other), rel=rtol), one.module

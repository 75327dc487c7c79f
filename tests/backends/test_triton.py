"""Which Triton runs the kernels."""

from __future__ import annotations

import sys
import types

import pytest

from rmm_linear.backends import triton


@pytest.mark.parametrize(
    ("version", "is_enough"), [("3.3.1", False), ("3.4.0", True), ("3.10.0+git1", True), ("4.0", True)]
)
def test_kernels_are_left_to_a_triton_that_compiles_them(version, is_enough, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__=version, __spec__=True))
    assert triton.is_installed.__wrapped__() == is_enough

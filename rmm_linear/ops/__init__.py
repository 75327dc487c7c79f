"""PyTorch operators of what is saved, with fakes and FLOP formulas, dispatched by device.

Only this folder chooses between plain PyTorch, the C library and the Triton kernels: :mod:`rmm_linear.ops.dispatch` has
the table, to which every other module adds its rows and its operators. ``ops/native`` and ``ops/triton.py`` adapt the
arguments of the plain functions to the library and to the kernels. All three make the same from the same seed. The
environment variable RMM_BACKEND overrides the choice: "torch" is plain PyTorch everywhere, "triton" the kernels, on CPU
in Triton's interpreter (TRITON_INTERPRET=1).

A seed is a tensor on the device. The host never reads it, so it never waits for the device.
"""

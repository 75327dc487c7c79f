"""Access to the C library and the Triton kernels."""

"""Where the implementations come from: the C library and the Triton kernels."""

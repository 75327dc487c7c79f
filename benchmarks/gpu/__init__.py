"""What a CUDA machine must show, what compilers say of the kernels, and bounds from data sheets."""

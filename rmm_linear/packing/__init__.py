"""Storage of a matrix in 8, 4 or 2 bits per element, in plain PyTorch."""

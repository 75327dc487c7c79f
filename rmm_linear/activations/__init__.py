"""Modules that save packed activations for the backward pass: exact forward, unbiased gradients."""

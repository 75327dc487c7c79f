"""Variance of gradients from packed stand-ins, in closed form."""

"""Closed-form variances of gradients from packed activations, exact and without simulation."""

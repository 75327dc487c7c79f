"""Closed-form variances of the gradients that packed stand-ins give, exact and without simulation."""

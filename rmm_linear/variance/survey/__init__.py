"""Variance of all kinds and widths of sketches on recorded inputs and gradients."""

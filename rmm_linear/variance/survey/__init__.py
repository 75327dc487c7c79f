"""Sketch noise of all kinds and widths on recorded inputs and gradients."""

"""Where states wait for the backward pass."""

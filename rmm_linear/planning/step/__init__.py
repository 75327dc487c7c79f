"""One training step, on real or fake tensors, and what it shows."""

"""Modules that save a packed stand-in instead of what their backward pass needs: exact forward, unbiased gradients."""

"""Stores for states that wait for the backward pass."""

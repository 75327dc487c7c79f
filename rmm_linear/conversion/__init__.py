"""Swap a model's linear layers for sketched ones, report it, save and load what was learned."""

"""The command ``rmm-linear``."""

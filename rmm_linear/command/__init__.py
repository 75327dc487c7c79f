"""The command ``rmm-linear``."""

PROGRAM = "rmm-linear"

"""Measurements: python -m benchmarks.<name> --help."""

"""Accuracy, bytes and time of our stand-ins beside other methods, in training: ``python -m benchmarks frontier``."""

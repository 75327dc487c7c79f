"""PEFT's method comparison: an experiment for it, and the same run on a tiny model."""

"""The tables of README and docs/, each made from a csv file: ``python -m benchmarks table``, or ``--check``."""

"""Integrations with other libraries' training loops. Each module imports its library; this package imports none."""

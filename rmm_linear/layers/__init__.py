"""Modules and functions whose input is saved as a sketch."""

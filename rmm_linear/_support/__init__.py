"""Helpers without sketches: files, tables, validation, autocast, provenance."""

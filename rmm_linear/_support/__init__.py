"""Helpers that know nothing of sketches: files, tables, validation, autocast, provenance."""

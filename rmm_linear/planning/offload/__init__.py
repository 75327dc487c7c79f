"""Offload what blocks save."""

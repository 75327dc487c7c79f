"""Closed-form variances of what stand-ins other than sketches add to gradients."""

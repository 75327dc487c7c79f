"""Where models look for the class that were pickled when it was here."""

from rmm_linear.context.model_context import SketchCache

__all__ = ["SketchCache"]

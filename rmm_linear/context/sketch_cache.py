"""The former place of SketchCache, for models that were pickled then."""

from rmm_linear.context.model_context import SketchCache

__all__ = ["SketchCache"]

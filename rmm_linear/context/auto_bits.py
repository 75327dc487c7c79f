"""The former place of AutoBits, which chose widths, for models that were pickled then."""

from __future__ import annotations


class AutoBits:
    """The choice of a layer, which is made without one now."""

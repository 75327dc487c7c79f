"""Plans for a captured graph."""

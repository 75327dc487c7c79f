"""Plans for the blocks of a model."""

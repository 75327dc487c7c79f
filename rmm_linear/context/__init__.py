"""State that the layers of a converted model share during one forward pass."""

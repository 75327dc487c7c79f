"""Training that fits a memory budget."""

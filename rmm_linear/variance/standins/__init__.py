"""The noise that packed stand-ins of operations other than linear layers add to gradients."""

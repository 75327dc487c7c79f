"""Run position-wise modules in slices of the sequence, so that their memory does not grow with its length."""

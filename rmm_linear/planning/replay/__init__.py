"""Save and restore random numbers, buffers, autocast and states, so that a step can be replayed."""

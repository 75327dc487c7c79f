"""What a step that runs again must see as it was: random numbers, buffers, autocast, states."""

"""Long chains of steps: bptt, sweep, checkpoint_chain."""

"""Plans for chains of steps, for graphs of networks, and for whole models within a budget."""

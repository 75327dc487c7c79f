"""Sketch noise and minibatch noise of the layers of a model while it trains."""

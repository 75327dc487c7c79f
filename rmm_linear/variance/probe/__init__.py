"""Measure the sketch noise and the minibatch noise of a model's layers while it trains."""

"""Measure the variances of sketches and of minibatches in a model's layers while it trains."""

"""Weights & Biases. Its package, which is an optional one, is loaded by the process of ``process`` alone."""

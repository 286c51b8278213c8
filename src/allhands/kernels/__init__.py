"""Faster forms of a model's operations, on CPUs and GPUs, and the choice among them."""

"""Faster forms of what a model computes, on CPUs and GPUs, and which of them are chosen."""

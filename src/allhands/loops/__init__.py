"""Worlds, loaders, checkpoints and metrics for training loops of your own."""

"""Worlds, loaders, checkpoints and metrics for people's own training loops."""

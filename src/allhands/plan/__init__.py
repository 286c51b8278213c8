"""Needs of a training, from the numbers of a model and of a step. It uses neither a device nor MLX."""

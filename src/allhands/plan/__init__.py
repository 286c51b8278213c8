"""Plan of a training: its time, memory and cost, from figures of a model and a step.

Nothing here computes on a device or uses MLX.
"""

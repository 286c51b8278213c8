"""Fast forms of a transformer's operations for NVIDIA GPUs, each with the plain form that it must
agree with.
"""

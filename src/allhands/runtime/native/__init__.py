"""Code in C for Linux CPUs, compiled on the computer that runs it; without a compiler everything
works without it.
"""

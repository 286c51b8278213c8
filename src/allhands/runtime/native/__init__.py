"""Code in C for Linux CPUs, compiled on the computer that runs it.

Without a compiler, allhands works without this code.
"""

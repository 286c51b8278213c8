"""The parts of the probe, in ASCII, on the standard library of Python 3.9.

Their sources are joined into one text and sent to computers that may not have allhands
(:mod:`allhands.cluster.probe`), so names at the top of a module are unique among all parts, and
parts import each other's names with ``from ... import``.
"""

"""The parts of the probe: the standard library of Python 3.9 and nothing else, in ASCII.

Their sources are joined into one text and sent to computers that may not have allhands (:mod:`allhands.cluster.probe`),
so names at the top of a module are unique among all parts, and what one part needs of another it imports with
``from ... import`` of the names themselves.
"""

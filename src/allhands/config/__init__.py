"""The options of a training: one schema, the sources of its values, and other tools' names for
options.
"""

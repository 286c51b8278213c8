"""The options of a training: one schema, where its values come from, and the names that other tools
give them.
"""

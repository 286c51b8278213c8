"""Ranks: their mesh, groups and collectives, what each back-end can do, and what all must agree on."""

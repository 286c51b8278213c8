"""Ranks: mesh, groups, collectives, capabilities of back-ends, and agreement of all ranks."""

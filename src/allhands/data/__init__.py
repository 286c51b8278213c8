"""Rows on the way from files to batches: records, tokens, their order, and what is wrong with them."""

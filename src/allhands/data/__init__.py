"""Data from files to batches: records, tokens, order, padding, and the checks on all of them."""

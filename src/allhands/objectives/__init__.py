"""Training objectives: sums and counts of a batch, never divided."""

"""What is trained for: sums and counts of a batch, never divided."""

"""A trained model on its way out: fused, for other programs, to the Hub."""

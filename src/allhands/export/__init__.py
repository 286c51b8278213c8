"""Export of trained models: fused, for other programs, to the Hub."""

"""What is seen of a run: metrics, samples of the computer, judgements and plots."""

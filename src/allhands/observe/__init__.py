"""Metrics of a run, samples of its processes, judgements and plots."""

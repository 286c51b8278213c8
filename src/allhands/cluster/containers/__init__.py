"""Training in a container of a platform: inputs as options, this computer's ranks, results."""

"""What people's own training loops use: worlds, loaders, checkpoints and metrics."""

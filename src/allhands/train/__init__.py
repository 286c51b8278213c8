"""One step: accumulate, reduce, norm, update. Optimizers, evaluation and callbacks."""

"""Models: loading, adapters, quantised weights, new models, and the passes that change modules."""

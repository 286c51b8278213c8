"""Fast forms of what a transformer computes, for NVIDIA GPUs; each beside the plain form that it must agree with."""

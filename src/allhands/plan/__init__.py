"""What a training will need, from the numbers of a model and of a step. No device and no MLX is needed here."""

"""Ways to divide the work of a step among ranks, each with its memory and traffic."""

"""What is wrong with a set of computers before training finds out: facts from each, pure checks, remedies."""

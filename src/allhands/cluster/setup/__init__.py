"""Set-up of computers for training: find what they lack, plan commands, ask, run and check them."""

"""Set-up of computers for training: what they lack is found, planned as commands, asked for, done
and checked.
"""

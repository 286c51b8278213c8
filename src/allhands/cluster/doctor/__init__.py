"""The doctor: facts from each computer, pure checks of them, and remedies."""

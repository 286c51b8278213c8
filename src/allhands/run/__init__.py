"""One rank's run: its assembly, its loop, its saved files and its messages."""

"""One rank's run: its parts put together, its loop, and what it saves and tells."""

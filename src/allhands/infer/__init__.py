"""Generation, conversations, and a server for them."""

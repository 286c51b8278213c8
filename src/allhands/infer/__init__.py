"""What a trained model says: generation, conversations, and a server for them."""

"""Layer 4: a chat in the terminal that shows which tokens the heads have guessed."""

"""Layer 3: the model answers prompts; its answers become the training set."""

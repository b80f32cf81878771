"""Layer 3: the training loop of heads and draft models."""

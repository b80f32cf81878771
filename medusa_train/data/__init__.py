"""Layer 2: prompts, rows of exact tokens, batches and hidden states."""

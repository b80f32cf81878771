"""Layer 2: the backbone, the heads and the draft model, and their files."""

"""Layer 0: pure functions of tensors. They know no config, rank, logger or model."""

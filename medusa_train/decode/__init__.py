"""Layer 2: one cache, one forward and one stopping rule for every decoding method."""

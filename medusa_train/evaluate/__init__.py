"""Layer 3: acceptance, tree search, speed and the report."""

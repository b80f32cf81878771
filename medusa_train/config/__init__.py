"""Layer 1: every setting of a run, typed and checked before anything is loaded."""
